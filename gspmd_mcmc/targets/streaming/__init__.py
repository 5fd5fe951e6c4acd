"""The pass over the rows of a plate."""
