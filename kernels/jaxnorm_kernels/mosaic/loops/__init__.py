"""Loops over rows, forward and backward, which run the formulas of an operation."""
