"""softmax and log_softmax, with a mask and a bias."""
