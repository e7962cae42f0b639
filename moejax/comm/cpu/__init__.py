"""Collectives of several CPU processes, beside compute.

Read in this order: `gloo` (which collectives of a program are rewritten, and in which order they
go), `exchange` with `exchange.cc` (all-to-alls and rings over sockets of our own), `peers` (who is
connected to whom), `held` and `transfers` (what waits for what).
"""
