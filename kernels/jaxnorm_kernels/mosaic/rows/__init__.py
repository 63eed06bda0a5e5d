"""How blocks hold the rows of an array, split them by columns, and exchange their statistics."""
