"""The console script `moejax`: one word names the command, the rest is its own."""

import sys

import moejax

USAGE = """\
usage: moejax COMMAND ... | --version

  train     train a model (moejax train --help)
  prepare   turn text into token files (moejax prepare --help)
  eval      score held-out text with a checkpoint (moejax eval --help)
  generate  continue texts with a checkpoint (moejax generate --help)
  hf        import weights of Hugging Face's layout, and export them (moejax hf --help)
  plan      choose mesh, route and codecs, or measure links (moejax plan --help, plan probe --help)
  doctor    say which kernels run here, and why; --smoke runs them (moejax doctor --help)
  report    show what runs did, as a page (moejax report --help)
  aot       compile the train step for a cluster that is not here (moejax aot --help)

Exit codes: docs/formats/exit.md.
"""


def main() -> int:
    """Runs the command that the first argument names. Returns the exit code."""
    command, rest = (sys.argv[1:2] or [""])[0], sys.argv[2:]
    if command == "train":
        from moejax.train.__main__ import main as train

        return train(rest)
    if command == "prepare":
        from moejax.data.prepare import main as prepare

        return prepare(rest)
    if command == "eval":
        from moejax.evaluate.command import main as evaluate

        return evaluate(rest)
    if command == "generate":
        from moejax.serve.command import main as generate

        return generate(rest)
    if command == "hf":
        from moejax.convert.command import main as convert

        return convert(rest)
    if command == "plan":
        from moejax.plan.__main__ import main as plan

        return plan(rest)
    if command == "aot":
        from moejax.aot.command import main as aot

        return aot(rest)
    if command == "doctor":
        from moejax.aot.doctor import main as doctor

        def smoke(console):  # imports the trainer, which plain `doctor` does not need
            from moejax.train.smoke import smoke as run

            return run(console)

        return doctor(rest, smoke)
    if command == "report":
        from moejax.report.command import main as report

        return report(rest)
    if command in ("-V", "--version", "version"):
        print(f"moejax {moejax.__version__}")
        return 0
    if command in ("", "-h", "--help"):
        print(USAGE, end="")
        return 0
    known = "train, prepare, eval, generate, hf, plan, report, doctor, aot"
    print(f"moejax: error: no command {command!r}. Known: {known}.", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
