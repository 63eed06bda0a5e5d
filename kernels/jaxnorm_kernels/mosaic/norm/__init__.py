"""LayerNorm and RMSNorm, alone and with a residual."""
