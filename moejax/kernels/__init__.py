"""Operations on one device, each with a form that runs everywhere.

Read in this order: `select` (which implementation runs, and why), `attention/`, `chunks`, `delta`
and `state_space` (linear attention: by the delta rule, and of Mamba-2), `experts/`, `permute` (rows
between orders), `formats`, `costs` (of operations, for the planner), `kept` (names of values that
remat policies keep). `mosaic/` has the kernels for Hopper GPUs.
"""
