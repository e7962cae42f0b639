"""Processes, devices and compiler options, independent of the model.

Read in this order: `processes` (how they agree), `meeting` (before JAX starts), `assignment` (where
hosts may change), `start` (JAX and its devices), `jax_settings`, `memory`, `compiler` (options),
`program_cache`, `interrupt` (signals), `watch` (a watchdog), `event_log` (JSON lines). `patches`
has every private part of other libraries.
"""
