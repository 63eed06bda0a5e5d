"""Loss kernels: cross-entropy with integer labels, log-probability and entropy, KL divergence."""
