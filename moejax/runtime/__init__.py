"""Processes, devices and compiler options, independent of the model.

Read in this order: `processes` (how they agree), `start` (JAX and its devices), `memory`,
`compiler` (options), `interrupt` (signals), `event_log` (JSON lines).
"""
