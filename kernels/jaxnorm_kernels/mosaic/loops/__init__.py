"""Loops over rows, forward and backward: they take an operation's formulas."""
