"""A call of an operation: its static description, its arrays as rows, and its implementation."""
