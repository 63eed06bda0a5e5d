"""Kernels of softmax and log_softmax, with an optional mask and bias."""
