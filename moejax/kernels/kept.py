"""Names of values that remat policies keep for backward.

`comm.wire` names what was communicated.
"""

# Integers that say where rows lie: they are few, and dear to find.
PLACES = "places"
# What attention and the router give, and the residual stream behind attention.
ATTENDED = "attended"
# Gate and up of hidden layers: of experts as many numbers as rows and twice the hidden width.
GATE_AND_UP = "gate_and_up"
