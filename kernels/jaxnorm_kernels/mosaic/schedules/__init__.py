"""Which kernel runs a call, and with which parameters."""
