"""The command `python -m moejax.aot`."""

import sys

from moejax.aot.command import main

if __name__ == "__main__":
    sys.exit(main())
