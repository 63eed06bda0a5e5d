"""Calls on arrays that a mesh splits: Explicit, Auto and Manual axes."""
