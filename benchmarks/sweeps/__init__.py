"""The inputs of `benchmarks.sweep`. Each file has workloads and schedules of one kind of kernel."""
