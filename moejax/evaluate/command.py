"""The command `moejax eval`: the likelihood of held-out text under a checkpoint."""

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from moejax.config.checks import resolve_mesh
from moejax.config.command_line import Parser
from moejax.config.load import split_overrides
from moejax.data.batches import count_eval_batches
from moejax.data.tokenizer import Tokenizer
from moejax.errors import InputError, exit_code
from moejax.evaluate.checkpoint import Chosen, choose, on_all_devices, read_weights
from moejax.evaluate.documents import DocumentScore, scores, sum_documents
from moejax.evaluate.held_out import HeldOut, open_held_out
from moejax.evaluate.report import Result, print_tables
from moejax.layout.layout import build_layout
from moejax.layout.mesh import build_mesh
from moejax.runtime.processes import Processes
from moejax.runtime.start import join, platform_of, start
from moejax.screen import screen
from moejax.step.state import TrainState
from moejax.step.train_step import TrainStep, build_step
from moejax.train.evaluation import Score, score
from moejax.train.inputs import held_out_batches
from moejax.train.records.summary import check_memory
from moejax.train.start import check_same_config, check_simulated_devices

SECONDS_BETWEEN_LINES = 10  # of progress without a terminal
EPILOG = """\
examples:
  moejax eval --run runs/tiny
  moejax eval --run runs/books --data data/books.eval.bin --by-document
  moejax eval --run runs/books --step 400 --data new/*.txt --json
  moejax eval --run imported/olmoe --data wiki.jsonl --config.mesh.expert=8

Without --data the held-out files of the run are scored. The mesh is the run's;
a setting of an axis describes another, in which axes that are not named have
one device. Nothing in the run directory is changed. Fields of --json:
docs/formats/eval.md. Exit codes: 0 done, 2 bad input, 130 stopped.
"""


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the flags."""
    command = Parser(
        prog="moejax eval",
        description="Scores held-out text: nats per token, perplexity, bits per byte.",
        epilog=EPILOG,
    )
    add = command.add_argument
    add("--run", metavar="DIR", required=True, help="a run directory, or an imported checkpoint")
    add("--step", type=int, metavar="N", help="its checkpoint of step N (default: the newest)")
    add(
        "--data",
        nargs="+",
        default=[],
        metavar="FILE",
        help="token files, or texts: .jsonl, .parquet, else one document",
    )
    add("--text-field", metavar="NAME", help="field of the text (default: text)")
    add("--tokenizer", metavar="FILE", help="for texts (default: the model's)")
    add("--eos", metavar="TOKEN", help="ends a document; with --tokenizer")
    add("--by-document", action="store_true", help="score each document too")
    add("--json", action="store_true", help="print one JSON object")
    add("--config.FIELD", metavar="VALUE", dest="_", help="override a setting of the run")
    add("--debug", action="store_true", help="show tracebacks of bad input")
    return command


def main(argv: list[str] | None = None) -> int:
    """Runs the command. Returns the exit code."""
    rest, overrides = split_overrides(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(rest)

    def run() -> None:
        with join() as processes:
            _run(args, overrides, processes)

    return exit_code(run, stopped="nothing was changed", debug=args.debug, files=True)


def _run(args: argparse.Namespace, overrides: list[str], processes: Processes) -> None:
    """Evaluates and prints; process 0 alone prints."""
    console = screen(stderr=True, quiet=not processes.first)
    chosen = choose(args.run, args.step, overrides, processes)
    check_simulated_devices(chosen.cfg)
    check_same_config(chosen.cfg, processes)
    flags = {name: getattr(args, name) for name in ("text_field", "tokenizer", "eos")}
    with open_held_out(args.data, chosen, **flags) as held_out:
        for note in (*chosen.notes, *held_out.notes):
            console.print(note, highlight=False, soft_wrap=True)
        result = _evaluate(chosen, held_out, args.by_document, processes, console)
    if processes.first and args.json:
        print(result.to_json())
    elif processes.first:
        print_tables(result, screen())


def _evaluate(
    chosen: Chosen, held_out: HeldOut, by_document: bool, processes: Processes, console: Console
) -> Result:
    """Starts devices, reads the weights, and scores the whole stream."""
    tokenizer = _tokenizer(held_out, console) if by_document else None
    devices = start(chosen.cfg.mesh)
    platform = platform_of(devices)
    cfg = on_all_devices(chosen.cfg, len(devices))
    cfg = resolve_mesh(cfg, len(devices), platform, processes=processes.count)
    whole_step = build_step(cfg, build_mesh(build_layout(cfg.mesh), devices), platform)
    train_step = whole_step.of_weights()
    check_memory(train_step, processes, gradients=False)
    state = read_weights(chosen, train_step, processes)
    source, documents = held_out.source, None
    with _progress(console, count_eval_batches(source, *train_step.batch_shape)) as advance:
        if by_document:
            found, documents = _by_document(
                train_step, state, held_out, tokenizer, processes, advance
            )
        else:
            found = score(train_step, state, source, processes=processes, progress=advance)
    place = str(chosen.saved.path)
    return Result(place, chosen.saved.step, held_out.files, source, found, documents)


def _by_document(
    train_step: TrainStep,
    state: TrainState,
    held_out: HeldOut,
    tokenizer: Tokenizer | None,
    processes: Processes,
    advance: Callable[[], None],
) -> tuple[Score, list[DocumentScore]]:
    """Returns the score of the stream and of its documents.

    Nats are summed in float64 token by token, so their last digits differ from those of `score`,
    which sums a batch in float32.
    """
    source = held_out.source
    processes.compile(
        train_step.target_nll, train_step.abstract, train_step.abstract_batch(training=False)
    )

    def nats() -> Iterator[np.ndarray]:
        for batch, _ in held_out_batches(train_step, source):
            yield np.asarray(train_step.target_nll(state, batch).addressable_data(0))
            advance()

    sums = sum_documents(source, nats(), math.prod(train_step.batch_shape))
    total = Score(math.fsum(sums.nats), sum(sums.tokens))
    return total, scores(source, sums, tokenizer, held_out.documents)


def _tokenizer(held_out: HeldOut, console: Console) -> Tokenizer | None:
    """Returns the tokenizer that counts the bytes of documents, if it is needed and here."""
    if held_out.documents is not None:
        return None
    try:
        return held_out.tokenizer()
    except InputError as error:
        console.print(f"bytes of documents are not known: {error}", highlight=False, soft_wrap=True)
        return None


@contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[], None]]:
    """Shows a bar on a terminal, and a line now and then elsewhere."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    done, last = 0, time.monotonic()
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with bar:
        task = bar.add_task("evaluating", total=total)

        def advance() -> None:
            nonlocal done, last
            done += 1
            bar.update(task, completed=done)
            if not console.is_terminal and time.monotonic() - last > SECONDS_BETWEEN_LINES:
                console.print(f"{done:,} of {total:,} batches", highlight=False)
                last = time.monotonic()

        yield advance
