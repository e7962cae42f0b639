"""Shows a run as one page: reads a run directory, writes or serves HTML. Needs no JAX.

Read in this order: `command` (`moejax report`), `runs` (a run's files), `timeline` (the history of
its processes), `stages` (time of a profile), `page`, `serve`. `goodput` is a command of its own.
"""
