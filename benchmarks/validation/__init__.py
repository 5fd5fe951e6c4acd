"""The proof that the samplers are right: real posteriors, and the judge of their draws."""
