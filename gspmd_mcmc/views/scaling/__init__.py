"""How long collectives and leapfrogs take on more devices, on paper."""
