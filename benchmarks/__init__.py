"""Benchmarks: this package beside its peers and beside the machine's floor, asked in turn."""
