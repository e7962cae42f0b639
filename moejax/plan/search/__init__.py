"""Searches for the best plan.

Read in this order: `space` (what may be chosen), `estimate` (a mesh priced without a trace),
`search`, `file` (plan.json).
"""
