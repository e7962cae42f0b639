"""Reads a traced train step into a schedule that can be priced.

Read in this order: `reader` (the jaxpr, equation by equation), `fusion` (elementwise
operations that the compiler fuses), `schedule` (the result), `memory` (its peak).
"""
