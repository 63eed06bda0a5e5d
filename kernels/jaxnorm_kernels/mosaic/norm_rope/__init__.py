"""RMSNorm of heads and their rotation (RoPE)."""
