"""Kernels that walk rows, forward and backward: they know no operation."""
