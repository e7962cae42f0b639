"""Faults in a run, and the answers to them.

`bad_steps` with `spikes` (skipped updates, jumps of the loss), `replicas` (devices whose copies of
the state differ), `watching` (processes that hang).
"""
