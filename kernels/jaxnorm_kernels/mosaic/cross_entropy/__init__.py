"""softmax cross-entropy with integer labels."""
