"""Checkpoints: written, verified, found, read.

Read in this order: `manifest` (what a checkpoint is), `writer`, `arrays`, `digests` and `verify`
(restored numbers are the saved ones), `find`, `restore`, `compatible` (rules for changed settings),
`source` (weights to start from), `load` (without devices), `remote` (copies in object stores),
`disk_space`. Format: docs/formats/checkpoint.md.
"""
