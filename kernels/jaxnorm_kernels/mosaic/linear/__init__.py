"""RMSNorm and the matmul after it, in one kernel."""
