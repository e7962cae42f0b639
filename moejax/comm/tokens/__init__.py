"""The token exchange of an expert layer: dispatch and combine along a route.

Read in this order: `buckets` (who goes to which peer), `rows` (rows into buckets, with codecs),
`hops` (one hop after the other), `pipeline` (chunks, so that hops and experts overlap), `rounds`
(what does not fit its buckets).
"""
