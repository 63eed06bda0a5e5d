"""The public functions, and the checks of their arguments."""
