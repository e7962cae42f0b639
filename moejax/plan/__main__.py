"""The command `python -m moejax.plan`: its first word says what to do."""

import sys

USAGE = """\
usage: moejax plan COMMAND ...

  probe     measure this cluster's links and devices (moejax plan probe --help)
"""


def main(argv: list[str] | None = None) -> int:
    """Runs the command that the first argument names. Returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    command, rest = (words[:1] or [""])[0], words[1:]
    if command == "probe":
        from moejax.plan.probe import main as probe

        return probe(rest)
    if command in ("", "-h", "--help"):
        print(USAGE, end="")
        return 0
    print(f"moejax: error: no command {command!r} of plan. Known: probe.", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
