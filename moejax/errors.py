"""The one exception that means "the user can fix this", and what a command makes of it."""

import sys
from collections.abc import Callable


class InputError(ValueError):
    """A wrong setting, file or checkpoint. Shown as one line; the process exits with code 2.

    The message says, in this order: what is wrong, the value seen, the rule, what to do.
    """


def exit_code(
    run: Callable[[], int | None], *, stopped: str, debug: bool = False, files: bool = False
) -> int:
    """Runs a command and returns its exit code: 2 for bad input, 130 for Ctrl-C.

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
    except KeyboardInterrupt:
        print(f"moejax: stopped; {stopped}", file=sys.stderr)
        return 130
