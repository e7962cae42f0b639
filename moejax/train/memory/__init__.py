"""Copies of a run's state in the memory of its hosts, between checkpoints on disk.

Read in this order: `placement` (which process keeps which shard), `folder` and `slots` (files),
`members` and `exchange` (processes, and transfers between hosts), `checkpoints` (saves), `find` and
`restore` (a start), `start` (all of it in the order of a run). Files: docs/formats/memory.md.
`headroom` ends a run before a host's memory is full.
"""
