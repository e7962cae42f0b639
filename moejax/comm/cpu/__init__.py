"""Collectives of several CPU processes, beside compute.

Read in this order: `gloo` (rewrites the collectives of a program and orders them), `exchange` with
`exchange.cc` (all-to-alls and rings over sockets of our own), `peers` (connects the devices),
`held` and `transfers` (arrays and transfers that are waited for).
"""
