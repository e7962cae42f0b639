"""Measures the links and the devices of the cluster that it runs on.

Read in this order: `command`, `measure` (the whole probe), `nodes` (groups of devices), `timer`,
`links`, `device` (and copies to its host), `program` (a whole step beside its operations alone),
`fit`, `show`.
"""
