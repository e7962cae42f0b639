"""The command `moejax report`."""

import argparse
from pathlib import Path

from moejax.config.checks.paths import check_output
from moejax.config.command_line import Parser
from moejax.errors import InputError, exit_code
from moejax.report.page import write_report
from moejax.report.serve import LOOPBACK, Server

EPILOG = """\
examples:
  moejax report runs/tiny                          # writes report.html
  moejax report runs/a runs/b --out compared.html  # beside each other
  moejax report runs/tiny --live                   # follows the run

The page needs no other file; docs/formats/metrics.md says what it holds.
Serving to other machines needs --host; the printed address then carries a
token, without which nothing is shown.
"""


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    command = Parser(
        prog="moejax report",
        description="Shows runs: curves, experts' load, plan, traffic, events, config.",
        epilog=EPILOG,
    )
    command.add_argument("run_dir", nargs="+", type=Path, metavar="RUN_DIR", help="of a run")
    command.add_argument(
        "--out", type=Path, metavar="FILE", help="the page to write (default: report.html)"
    )
    command.add_argument("--live", action="store_true", help="serve the page, and follow the runs")
    command.add_argument("--port", type=int, default=8421, help="with --live; 0: a free one")
    command.add_argument(
        "--host",
        default="127.0.0.1",
        help="with --live: address to listen on, if not this machine's own",
    )
    command.add_argument("--debug", action="store_true", help="show tracebacks of bad input")
    return command


def main(argv: list[str]) -> int:
    """Runs the command. Returns the exit code."""
    args = parser().parse_args(argv)
    stopped = "nothing of the runs was changed"
    return exit_code(lambda: run(args), stopped=stopped, debug=args.debug, files=True)


def run(args: argparse.Namespace) -> int:
    """Writes the page, or serves it until Ctrl-C."""
    if args.live and args.out is not None:
        raise InputError(
            "where should the page go? Got --out and --live. It is written with --out FILE or "
            "served with --live. Choose one."
        )
    if not args.live:
        out = args.out or Path("report.html")
        check_output(out, "--out")
        write_report(args.run_dir, out)
        print(f"wrote {out}: open it in a browser")
        return 0
    if not 0 <= args.port <= 65535:
        raise InputError(f"no such port. {args.port}. Ports are 0 to 65535. Choose another --port.")
    with Server(args.run_dir, args.host, args.port) as server:
        if args.host not in LOOPBACK:
            print("others can reach this address; whoever has the token sees the runs")
        runs = "1 run" if len(args.run_dir) == 1 else f"{len(args.run_dir)} runs"
        print(f"following {runs} at {server.url} (Ctrl-C ends)", flush=True)
        server.serve_forever()
    return 0
