"""The planner: chooses mesh, route, chunks, codecs and recomputation by measured rates.

Read in this order: `cluster/` (links and rates), `probe/` (measures them), `trace/` (reads the
traced step), `price/` (prices and simulates it), `search/` (finds the best), `report/` (says why),
`published` (published models as configs), `others/` (a plan in settings of other trainers),
`command` (`moejax plan`, which `__main__` runs). `aot` is a former name of `moejax.aot`.
"""
