"""The operations of rows as JAX primitives: derivatives, batching, lowering."""
