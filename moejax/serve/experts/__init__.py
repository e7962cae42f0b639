"""Which experts the places of devices hold, and how many of an expert's tokens go to each.

Read in this order: `tables` (plans by load), `paths` (loads before they are there), `places` (moves
weights as a table says, and follows the load while texts are under way).
"""
