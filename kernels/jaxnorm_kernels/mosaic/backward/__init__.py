"""Backward passes: rings and tiles of rows, and the tables that choose among them."""
