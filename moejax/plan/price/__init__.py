"""Prices a schedule on a cluster.

Read in this order: `routing` (rows of the busiest device), `cost` (seconds of each operation),
`simulate` (streams that overlap), `candidate` (a config, traced and priced), `terms` (the parts of
its step time), `sensitivity` (which rate must change for another plan to win).
"""
