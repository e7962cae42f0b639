"""Runs: everything from an empty directory to trained weights.

Read in this order: `__main__` (the command), `loop` (the run, in order), `start` (checks and first
state), `planning`, `inputs`, `steps`, `evaluation`, `rollback`. `records/`: what a run writes about
itself; `faults/`: what it does about bad numbers; `memory/`: copies in hosts' memory.
"""
