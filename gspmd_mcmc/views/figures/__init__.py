"""What the figures of a run are made of."""
