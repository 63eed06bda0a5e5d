"""The public functions and the checks of what users pass in."""
