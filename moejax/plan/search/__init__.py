"""Searches for the best plan.

Read in this order: `space` (the choices), `estimate` (rough prices without a trace),
`search`, `file` (plan.json).
"""
