"""The token exchange of an expert layer: dispatch and combine along a route.

Read in this order: `buckets` (slots for items, in the bucket of their peer), `plan` (the slots of
all hops), `rows` (tokens encoded into bucket rows, results decoded and summed), `swap` (one
all-to-all, gather or sum), `hops` (one hop of dispatch; one hop of combine, its mirror), `pipeline`
(chunks, so that hops and experts overlap), `rounds` (overflow rounds, if a bucket is too small).

Letters of this folder:

    N  tokens of this device      D  width            K  choices a token or row
    P  peers of a hop             I  parts of a bucket
    J  slots of one part for one peer; j of a piece of them
    M  rows of a part, of all peers; before the first exchange the N tokens
    Q  P * J slots of a part, which a hop fills from M rows
    S  I * P * J slots of all parts and peers
    A  M * K assignments          k  choices in a slot (K if merged, else 1)
    C  chunks                     R  rows of a chunk: those of its parts joined
    X  all-to-all hops            G  groups
    n  devices along the axes of a hop that gathers or sums
"""
