"""Profiles some steps of a run with JAX's profiler, for `xprof` to open.

The program's text, kept beside the trace, names the scope of each operation (`experts`,
`attention`, `dispatch`, ...): with it `moejax report` sums the time by stage. The memory profile,
of a moment between two steps, is for `pprof`.
"""

import gzip
from collections.abc import Callable
from pathlib import Path

import jax

from moejax.config.schema import ProfileConfig

DIRECTORY = "profile"  # in the run directory
PROGRAM = "program.txt.gz"  # in that: the text of the compiled step


def name_operations(cfg: ProfileConfig) -> None:
    """Makes the names in the code part of the key of compiled programs, if steps are profiled.

    Else a profile may show a cached program: the same operations under older names and lines.
    """
    if cfg.start_step is not None:
        jax.config.update("jax_compilation_cache_include_metadata_in_key", True)


class Profile:
    """Starts and ends the profile of a run at its steps.

    All processes call it: each writes the trace of its own devices, into a directory of its own.
    """

    def __init__(self, cfg: ProfileConfig, run_dir: Path, *, process: int = 0):
        """Starts nothing yet. Process 0 also writes the program and a memory profile."""
        self.directory = run_dir / DIRECTORY
        # A trace is named by its host, on which there may be several processes.
        self._traces = self.directory / f"process_{process}" if process else self.directory
        self._cfg, self._first = cfg, process == 0
        self._started = False

    def before(self, step: int) -> None:
        """Starts the trace if `step`, which comes next, is the first to profile."""
        if step == self._cfg.start_step:
            jax.profiler.start_trace(str(self._traces))
            self._started = True

    def after(self, step: int, result: jax.Array, program: Callable[[], str]) -> bool:
        """Ends the trace if `step` was the last to profile. Returns whether it was.

        Args:
          result: of the step; waits for it.
          program: returns the text of the compiled step.
        """
        start, count = self._cfg.start_step, self._cfg.num_steps
        if not self._started or start is None or step < start + count - 1:
            return False
        jax.block_until_ready(result)
        self.close()
        if self._first:
            (self.directory / PROGRAM).write_bytes(gzip.compress(program().encode(), 1))
            jax.profiler.save_device_memory_profile(str(self.directory / "memory.prof"))
        return True

    def close(self) -> None:
        """Ends the trace, if one is running, and keeps its file."""
        if self._started:
            jax.profiler.stop_trace()
            self._started = False
