"""Pipeline stages: a train step whose layers lie on several groups of devices.

Read in this order: `schedule` (which tick does what), `model` (the model as a stage sees it),
`visits`, `inputs` and `residuals` (what a stage starts from and keeps), `loss`, `ticks` (the
step), `forward` (evaluation and sampling). `weights`: those that stages share.
"""
