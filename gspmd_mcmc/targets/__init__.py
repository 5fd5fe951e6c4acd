"""Log densities: what they are made of, and how a plate streams its rows."""
