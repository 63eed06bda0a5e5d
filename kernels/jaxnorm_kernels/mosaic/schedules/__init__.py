"""The choice of a call's kernel and of its parameters."""
