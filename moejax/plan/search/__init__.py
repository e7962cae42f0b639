"""Searches for the best plan.

Read in this order: `space` (the choices), `estimate` (rough prices without a trace), `fitting`
(what fits the memory), `budget` (traces and seconds), `search`, `sites` (an outer loop), `file`
(plan.json).
"""
