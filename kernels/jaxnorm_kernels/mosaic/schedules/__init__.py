"""Schedules: which kernel runs a call, and with how many threads, blocks and rows per block."""
