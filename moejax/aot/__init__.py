"""Compiles the train step for a cluster that is not here, and reads what came out.

Read in this order: `command`, `step` (compiles it), `target` (described devices), `compiled` with
`hlo` (the compiled text), `exposed` (which exchanges are waited for), `doctor` (which kernels run,
and why).
"""
