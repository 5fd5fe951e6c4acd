"""Programs for devices that are not here: compiled, counted, and timed on paper."""
