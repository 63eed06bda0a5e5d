"""RMSNorm and the product after it, in one kernel."""
