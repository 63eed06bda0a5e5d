"""Passes of calls as JAX primitives: derivatives, batching, lowering."""
