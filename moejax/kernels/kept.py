"""Names of values that remat policies keep for backward.

`comm.wire` has the names of communicated values.
"""

# Integers that say where rows lie: they are few, and dear to find.
PLACES = "places"
# Results of attention and the router, and the residual stream behind attention.
ATTENDED = "attended"
# Gate and up of hidden layers: of experts as many numbers as rows and twice the hidden width.
GATE_AND_UP = "gate_and_up"
# Inverses of a chunk's corrections (`kernels.delta`), from which backward computes the rest again.
INVERSES = "inverses"
