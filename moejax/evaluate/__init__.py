"""Held-out likelihood of a checkpoint: `moejax eval`. Its name is what trainers call their verb.

Read in this order: `command`, `checkpoint` (which one, and the settings of its model), `held_out`
(token files or texts), `documents` (their scores), `report`.
"""
