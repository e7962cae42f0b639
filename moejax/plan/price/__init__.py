"""Prices a schedule on a cluster.

Read in this order: `routing` (rows of the busiest device), `cost` (seconds of each operation),
`simulate` (streams that overlap), `host` (bytes of a node's memory; when keeping beats
recomputing), `candidate` (a config, traced and priced), `terms` (the parts of its step time),
`sensitivity` (which rate must change for another plan to win).
"""
