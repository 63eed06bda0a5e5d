"""Cross-entropy with integer labels, and log-probability and entropy."""
