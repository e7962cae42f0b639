"""Reads a traced train step into a schedule that can be priced.

Read in this order: `reader` (the jaxpr, equation by equation), `fusion` (what the compiler makes
one operation of), `schedule` (the result), `memory` (its fullest moment).
"""
