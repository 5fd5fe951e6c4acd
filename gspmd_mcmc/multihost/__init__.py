"""Several processes: who is here, what all of them must agree on, and what each holds."""
