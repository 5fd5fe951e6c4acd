"""Where arrays live: meshes, placement, and the padding of uneven rows."""
