"""Inputs of `benchmarks.sweep`: one file for each question."""
