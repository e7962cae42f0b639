"""Compiles the train step ahead of time for a described cluster, and reads the compiled program.

Read in this order: `command` (which `__main__` runs), `step` (compiles it), `target` (described
devices), `compiled` with `hlo` (the compiled text), `work` with `products` and `traffic` (a
device's work in a step).
"""
