"""Checkpoints: written, verified, found, read.

Read in this order: `manifest` (what a checkpoint is), `writer`, `arrays`, `digests` and `verify`
(numbers are those that were saved), `find`, `restore`, `compatible` (which settings may change),
`source` (weights to start from), `load` (without devices), `remote` (copies in object stores),
`disk_space`. Format: docs/formats/checkpoint.md.
"""
