"""How blocks load rows, split them by columns, and exchange statistics between warps."""
