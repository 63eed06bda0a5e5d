"""Forward passes: tiles of rows, and the table that chooses among them."""
