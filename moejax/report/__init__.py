"""Shows a run as one page: reads a run directory, writes or serves HTML. Needs no JAX."""
