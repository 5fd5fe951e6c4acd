"""Inverse mass matrices: what each does to momenta, leaf by leaf."""
