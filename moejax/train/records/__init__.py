"""Records of a run.

`metrics` (reports and events, to `metrics.jsonl` and TensorBoard) with `trackers` (Weights &
Biases, MLflow); `display` (lines for the user); `summary` (the table at the start); `start_record`
(config, devices and traffic of a start, load of experts); `profile` (traces of some steps);
`skipped_data` (batches that the run left out).
"""
