"""Loops over the rows of an array, in forward and backward kernels."""
