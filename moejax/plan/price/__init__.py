"""Prices a schedule on a cluster.

Read in this order: `routing` (rows of the fullest device), `cost` (seconds of each operation),
`timeline` and `simulate` (streams that overlap), `candidate` (a config, traced and priced), `terms`
(what its step is made of), `sensitivity` (which rate would have to change for another plan to win).
"""
