"""Profiles some steps of a run with JAX's profiler, for `xprof` to open.

The trace names operations by the scopes of the code (`experts`, `attention`, `dispatch`, ...). The
memory profile, of a moment between two steps, is for `pprof`.
"""

from pathlib import Path

import jax

from moejax.config.schema import ProfileConfig

DIRECTORY = "profile"  # in the run directory


def name_operations(cfg: ProfileConfig) -> None:
    """Has a step that will be profiled compiled with the names of today's code.

    A program that was kept may be of the same operations under older names and lines.
    """
    if cfg.start_step is not None:
        jax.config.update("jax_compilation_cache_include_metadata_in_key", True)


class Profile:
    """Starts and ends the profile of a run at its steps.

    All processes call it: each writes the trace of its own devices.
    """

    def __init__(self, cfg: ProfileConfig, run_dir: Path, *, first: bool):
        """Takes whether this process writes the memory profile: one does."""
        self.directory = run_dir / DIRECTORY
        self._cfg, self._first = cfg, first
        self._started = False

    def before(self, step: int) -> None:
        """Starts the trace if `step`, which comes next, is the first to profile."""
        if step == self._cfg.start_step:
            jax.profiler.start_trace(str(self.directory))
            self._started = True

    def after(self, step: int, result: jax.Array) -> bool:
        """Ends the trace if `step` was the last to profile. Returns whether it was.

        Args:
          result: of the step, which is waited for.
        """
        start, count = self._cfg.start_step, self._cfg.num_steps
        if not self._started or start is None or step < start + count - 1:
            return False
        jax.block_until_ready(result)
        self.close()
        if self._first:
            jax.profiler.save_device_memory_profile(str(self.directory / "memory.prof"))
        return True

    def close(self) -> None:
        """Ends the trace, if one goes on; what it has is kept."""
        if self._started:
            jax.profiler.stop_trace()
            self._started = False
