"""How blocks hold, split and exchange rows, in both directions."""
