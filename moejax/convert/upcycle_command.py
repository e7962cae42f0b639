"""The command `moejax upcycle`: a dense model becomes one with experts."""

import argparse
import sys
from pathlib import Path

from moejax.config.command_line import Parser
from moejax.config.load import split_overrides
from moejax.convert.command import add_dtype
from moejax.errors import exit_code

EPILOG = """\
examples:
  moejax upcycle runs/dense --out upcycled/8x
  moejax upcycle runs/dense --out upcycled/fine --config.moe.num_experts=32 \\
      --config.moe.experts_per_token=8 --config.moe.expert_hidden=96
  moejax train --config upcycled/8x/config.json

The first copies each MLP 8 times (moe.num_experts). In the second, if the MLP's
hidden width is 384, each expert is a quarter of it. At step 0 the loss is that
of the dense model; what would change it is refused, except --noise. It writes
OUT/0 (weights) and OUT/config.json: the dense run's settings, with the experts.
docs/models.md says more.
"""


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the flags."""
    command = Parser(
        prog="moejax upcycle",
        description="Turns the dense MLPs of a checkpoint into experts, which begin as its copies.",
        epilog=EPILOG,
    )
    add = command.add_argument
    add("path", type=Path, metavar="RUN", help="run directory or checkpoint of a dense model")
    add("--out", type=Path, required=True, metavar="DIR", help="new folder")
    add(
        "--noise",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="noise on each expert, as a share of its matrix's deviation (default 0)",
    )
    add("--seed", type=int, default=0, metavar="N", help="of routers and noise (default 0)")
    add("--config.FIELD", metavar="VALUE", dest="_", help="a setting of the new model or its run")
    add_dtype(command, "float32", "bfloat16 takes half the room and rounds")
    return command


def main(argv: list[str] | None = None) -> int:
    """Runs the command. Returns the exit code."""
    rest, overrides = split_overrides(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(rest)

    def run() -> None:
        # Imported late, so that help comes at once.
        from moejax.convert.upcycling import upcycle

        upcycle(
            args.path,
            args.out,
            dtype=args.dtype,
            noise=args.noise,
            seed=args.seed,
            overrides=overrides,
        )

    return exit_code(run, stopped="nothing was written", debug=args.debug, files=True)
