"""The speed of a cluster's links and devices, measured or described.

Read in this order: `topology` (tiers, links), `pairs` (links that differ), `device` (rates of one),
`file` (topology.json, and the clusters that come with moejax in `known/`), `json_object` (a JSON
object read field by field).
"""
