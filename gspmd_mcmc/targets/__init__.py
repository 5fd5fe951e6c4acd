"""Log densities: what they are made of, and how they are streamed over the mesh."""
