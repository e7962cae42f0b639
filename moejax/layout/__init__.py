"""The sharding of arrays and the route of tokens, as static values.

Read in this order: `layout` (mesh axes and dimension letters), `mesh` (the devices behind them),
`route` (the hops of the token exchange), `spec` (all static choices of a compiled step).
"""
