"""Forward passes: tiles and streams of rows, and the table that chooses among them."""
