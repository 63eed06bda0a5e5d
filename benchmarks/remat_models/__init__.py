"""Twelve models, and what each of them saves for its backward pass with and without auto_remat."""
