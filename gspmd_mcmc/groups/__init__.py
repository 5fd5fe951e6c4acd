"""Groups of rows of unequal sizes, stored where their latents are."""
