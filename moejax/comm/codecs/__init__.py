"""Codecs of what travels between nodes.

Read in this order: `build` (each codec, and the one that a setting names), `pack` (several arrays
as one message).
"""
