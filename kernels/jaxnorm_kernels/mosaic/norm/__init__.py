"""Kernels of LayerNorm and RMSNorm, optionally with a residual addition, a gate or a rotation."""
