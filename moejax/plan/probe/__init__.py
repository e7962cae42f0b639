"""Measures the links and the devices of the cluster that it runs on.

Read in this order: `command` (what is measured, and how well it holds), `nodes` (which devices
share one), `timer`, `links`, `device`, `program` (a whole step, beside its parts), `fit`.
"""
