"""What `benchmarks.sweep` tries: a file for each question."""
