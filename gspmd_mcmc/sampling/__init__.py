"""The driver: starting points, warm-up, chunks of steps, and the draws."""
