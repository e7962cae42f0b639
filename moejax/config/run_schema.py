"""Settings of what a run leaves behind, and of when a part of it counts as hung."""

from dataclasses import dataclass

from moejax.config.declare import setting


@dataclass(frozen=True)
class ProfileConfig:
    """Which steps are profiled, into run_dir/profile."""

    start_step: int | None = setting(
        None, "first step of the profile; none: no profile", at_least=1
    )
    num_steps: int = setting(3, "steps of the profile; many make it slow to open", at_least=1)


@dataclass(frozen=True)
class TrackConfig:
    """Who else is told the metrics, by process 0, beside metrics.jsonl and TensorBoard."""

    wandb: str | None = setting(None, "project of Weights & Biases; none: it is not told")
    mlflow: str | None = setting(None, "experiment of MLflow; none: it is not told")


@dataclass(frozen=True)
class CheckpointConfig:
    """What is kept of a run."""

    save_every: int | None = setting(
        100, "steps between checkpoints; none: only at the end", at_least=1
    )
    # No range of its own: configs of older runs may keep one, and are read.
    keep: int = setting(
        3, "newest checkpoints to keep; a run keeps at least 2, one to fall back to"
    )
    copy_to: str | None = setting(
        None, "second place of finished checkpoints, such as s3://bucket/run; none: no copies"
    )
    memory_every: int | None = setting(
        None,
        "steps between copies of the state in the hosts' memory; none: no copies",
        at_least=1,
    )
    memory_dir: str = setting("/dev/shm", "folder of these copies, of a file system in memory")
    init_from: str | None = setting(None, "checkpoint directory to take weights from at step 0")
    verify: str = setting("full", "what is checked before a restore", choices=("full", "size"))
    allow_changed_data: bool = setting(
        False, "go on although the data are not those that the checkpoint was trained on"
    )


@dataclass(frozen=True)
class WatchdogConfig:
    """Seconds after which a stage of a run counts as hung: the process ends with exit code 124."""

    start_s: float | None = setting(
        1800, "devices, plan and restore, until compilation; none: any time", above=0
    )
    compile_s: float | None = setting(3600, "a compilation", above=0)
    step_s: float | None = setting(900, "a step, or waiting for its batch", above=0)
    evaluate_s: float | None = setting(
        3600, "one batch of an evaluation, its compilation included, or the sample", above=0
    )
    save_s: float | None = setting(3600, "waiting for a checkpoint", above=0)
    silent_s: float | None = setting(
        60, "no word from another process; JAX itself waits 100 s, with less to say", above=0
    )
