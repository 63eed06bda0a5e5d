"""How blocks hold the rows of an array, split them into columns, and exchange values of a row."""
