"""The JAX primitives of the calls, with their differentiation, batching and lowering rules."""
