"""Failures that have an exit code of their own, and what a command makes of them.

| code | meaning |
|---|---|
| 0 | done |
| 1 | a fault of moejax or of what it runs on; the traceback says which |
| 2 | bad input: `InputError` |
| 3 | stopped as asked before the last step; saved, the same command goes on |
| 4 | the run diverged: `DivergedError` |
| 5 | no space left where the run writes: `StorageFullError` |
| 130 | stopped at once (a second Ctrl-C); the last finished checkpoint is intact |
"""

import sys
from collections.abc import Callable

STOPPED = 3  # exit code of a run that was asked to stop before its last step


class InputError(ValueError):
    """A wrong setting, file or checkpoint. Shown as one line; the process exits with code 2.

    The message says, in this order: what is wrong, the value seen, the rule, what to do.
    """


class RunError(Exception):
    """Ends a run in a way that a script should be able to tell apart. Shown as one line.

    The message says what happened, which checkpoint is safe, and what to do.
    """

    code = 1


class DivergedError(RunError):
    """Too many updates in a row were not finite, so the run would only waste time."""

    code = 4


class StorageFullError(RunError):
    """No space is left for what the run must write."""

    code = 5


def exit_code(
    run: Callable[[], int | None], *, stopped: str, debug: bool = False, files: bool = False
) -> int:
    """Runs a command and returns its exit code; see the table above.

    Args:
      run: gives the exit code, or None for 0.
      stopped: what to say after Ctrl-C about what was written.
      debug: bad input is raised, so that its traceback is seen.
      files: an error of the file system is bad input too.
    """
    try:
        return run() or 0
    except (InputError, OSError) as error:
        if debug or not (files or isinstance(error, InputError)):
            raise
        print(f"moejax: error: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        if debug:
            raise
        print(f"moejax: error: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print(f"moejax: stopped; {stopped}", file=sys.stderr)
        return 130
