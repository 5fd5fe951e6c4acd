"""The functions that users write: what they mean, and how they enter programs."""
