"""The token exchange of an expert layer: dispatch and combine along a route.

Read in this order: `buckets` (who goes to which peer), `plan` (where every row goes, hop after
hop), `rows` (rows into buckets, with codecs), `swap` (one hop), `hops` (a hop of dispatch, and of
combine, its mirror), `pipeline` (chunks, so that hops and experts overlap), `rounds` (what does not
fit its buckets).
"""
