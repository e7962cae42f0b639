"""Held-out likelihood of a checkpoint: `moejax eval`.

Read in this order: `command`, `checkpoint` (its choice, and the settings of its model), `held_out`
(token files or texts), `documents` (their scores), `report`.
"""
