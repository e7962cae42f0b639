"""The command `python -m moejax.plan`: plans; with `probe` as its first word, measures."""

import sys


def main(argv: list[str] | None = None) -> int:
    """Runs the command. Returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["probe"]:
        from moejax.plan.probe.command import main as probe

        return probe(words[1:])
    from moejax.plan.command import main as plan

    return plan(words)


if __name__ == "__main__":
    sys.exit(main())
