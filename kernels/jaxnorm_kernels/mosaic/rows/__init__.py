"""How blocks hold, cut and share rows, and reduce what they share: for both directions."""
