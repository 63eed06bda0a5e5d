"""LayerNorm and RMSNorm, with residual additions, a gate or a rotation."""
