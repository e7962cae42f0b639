"""Processes, devices and compiler options; nothing here knows what is trained.

Read in this order: `processes` (what they agree on), `start` (JAX and its devices), `memory`,
`compiler` (options), `interrupt` (signals), `event_log` (JSON lines).
"""
