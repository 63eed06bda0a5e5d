"""Backward passes: rings, tiles and streams of rows, and the tables that choose among them."""
