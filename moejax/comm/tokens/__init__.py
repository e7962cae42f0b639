"""The token exchange of an expert layer: dispatch and combine along a route.

Read in this order: `buckets` (slots for items, in the bucket of their peer), `plan` (the slots of
all hops), `rows` (tokens encoded into bucket rows, results decoded and summed), `swap` (one
all-to-all, gather or sum), `hops` (one hop of dispatch; one hop of combine, its mirror), `pipeline`
(chunks, so that hops and experts overlap), `rounds` (overflow rounds, if a bucket is too small).
"""
