"""Inputs of `benchmarks.sweep`: workloads and schedules, in a file for each kind of kernel."""
