"""A run: from an empty directory to trained weights.

Read in this order:

1. `__main__`: the command. It parses flags and calls `loop.train`.
2. `loop`: the run from top to bottom.
3. `run`: `Start` and `Run`, the two classes that hold what the stages of a run share.
4. `inputs` (batches on devices), `start` (checks, choice of a checkpoint, first state), `planning`
   (plan, mesh, step): a start, stage by stage.
5. `steps`: the loop over steps, with `codec_schedule` (a compiled step for each choice of codecs),
   `plan_monitor` (steps compared with their plan) and `evaluation` (held-out text, a sample).
6. `rollback`: back to the state before bad steps, and on without their batches.
7. `replay`: a command of its own that runs one step again and compares the bits.

Rooms: `records/` (metrics, lines, tables, trackers), `faults/` (bad numbers, differing devices,
hangs), `memory/` (copies of the state in hosts' memory), `sites/` (runs that meet in an outer
loop).
"""
