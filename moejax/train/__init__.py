"""Runs: everything from an empty directory to trained weights.

Read in this order: `__main__` (the command), `loop` (the run, in order), `start` (checks and first
state), `planning`, `inputs`, `checkpoint` with `manifest` and `resume`, `metrics`, `evaluation`.
"""
