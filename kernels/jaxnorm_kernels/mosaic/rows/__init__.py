"""How blocks load rows, split them into ranges of columns, and exchange statistics between warps."""
