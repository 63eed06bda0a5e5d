"""How blocks load rows, split them into column ranges, and exchange statistics between warps."""
