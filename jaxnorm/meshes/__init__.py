"""Calls on arrays that are sharded over a mesh with Explicit, Auto or Manual axes."""
