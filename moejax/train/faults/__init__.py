"""What a run does about bad numbers and faulty devices.

`bad_steps` with `spikes` (numbers), `replicas` (copies that differ), `watching` (processes that
hang).
"""
