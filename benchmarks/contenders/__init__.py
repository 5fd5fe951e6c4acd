"""The contenders, one library a file, each run by `benchmarks.worker` in a process of its own."""
