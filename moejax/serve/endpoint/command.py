"""The command `moejax serve`: a checkpoint's model over HTTP, an OpenAI-compatible API."""

import argparse
import json
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from socket import socket

from rich.console import Console

from moejax.config.command_line import Parser
from moejax.config.load import split_overrides
from moejax.errors import InputError, exit_code
from moejax.evaluate.checkpoint import Chosen
from moejax.runtime.interrupt import Interrupt
from moejax.runtime.processes import Processes
from moejax.runtime.start import join
from moejax.screen import screen
from moejax.serve.batch import Batch
from moejax.serve.endpoint.jobs import ServedModel
from moejax.serve.experts.places import Places
from moejax.serve.flags import (
    add_checkpoint,
    add_expert_slots,
    add_settings,
    add_tokenizer,
    check_slot_flags,
    choose_model,
    load_model,
)
from moejax.serve.prompts import ChatPrompts, Vocabulary, open_chat, open_vocabulary
from moejax.serve.texts import TokenTexts

EXTRA = ("starlette", "uvicorn", "prometheus_client")
API_KEY = "MOEJAX_API_KEY"
POSITIONS = 4096  # default, where the model has more
EPILOG = """\
examples:
  moejax serve --run runs/tiny
  moejax serve --run imported/olmoe --port 9000 --slots 16 --positions 2048
  moejax serve --run imported/olmoe --host 0.0.0.0 --api-key-file key

Routes: POST /v1/completions, POST /v1/chat/completions, GET /v1/models,
GET /health, GET /metrics. docs/guide/serve.md shows clients.
Exit codes: 0 stopped by SIGTERM, 2 bad input, 130 stopped by Ctrl-C.
"""


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the flags."""
    command = Parser(
        prog="moejax serve",
        description="Serves a checkpoint over HTTP (OpenAI-compatible API).",
        epilog=EPILOG,
    )
    add_checkpoint(command)
    add = command.add_argument
    add("--host", default="127.0.0.1", metavar="NAME", help="address (default: this machine only)")
    add("--port", type=int, default=8000, metavar="N", help="default: 8000; 0: a free one")
    add(
        "--api-key-file",
        metavar="FILE",
        help=f"file with the API key that clients send (or {API_KEY})",
    )
    add("--model-name", metavar="NAME", help="default: the name of the run's directory")
    slots = (
        "sequences that decode at a time, rounded up to a multiple of the devices that split the "
        "batch (default: 8)"
    )
    add("--slots", type=int, default=8, metavar="N", help=slots)
    positions = "context length: prompt and completion (default: the model's, at most 4096)"
    add("--positions", type=int, metavar="N", help=positions)
    add("--queue", type=int, default=64, metavar="N", help="sequences that wait (default: 64)")
    grace = "seconds that running requests may still take after a stop signal (default: 30)"
    add("--grace", type=float, default=30, metavar="S", help=grace)
    add_expert_slots(command)
    add_tokenizer(command)
    add_settings(command)
    return command


def main(argv: list[str] | None = None) -> int:
    """Runs the command. Returns the exit code."""
    rest, overrides = split_overrides(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(rest)

    def run() -> None:
        _check_extra()
        _check_flags(args)
        check_slot_flags(args)
        api_key = _api_key(args)
        with join() as processes:
            _run(args, overrides, api_key, processes)

    return exit_code(run, stopped="nothing was changed", debug=args.debug, files=True)


def _check_extra() -> None:
    missing = [name for name in EXTRA if find_spec(name) is None]
    if missing:
        raise InputError(
            f"a library is missing: {', '.join(missing)}. moejax serve needs it. It comes with an "
            f'extra. Run pip install "moejax[serve]".'
        )


def _check_flags(args: argparse.Namespace) -> None:
    """Refuses flags that are out of range."""
    ranges = {
        "port": (0 <= args.port < 2**16, "It is 0 to 65535"),
        "slots": (args.slots >= 1, "It is at least 1"),
        "positions": (args.positions is None or args.positions >= 2, "It is at least 2"),
        "queue": (args.queue >= 0, "It is at least 0"),
        "grace": (0 <= args.grace < float("inf"), "It is at least 0"),
    }
    for name, (holds, rule) in ranges.items():
        if not holds:
            value = getattr(args, name)
            raise InputError(f"`--{name}` is out of range. Got {value}. {rule}. Change it.")


def _api_key(args: argparse.Namespace) -> str | None:
    """Returns the API key that requests must carry.

    Raises:
      InputError: if others reach the address and there is none.
    """
    from moejax.serve.endpoint.app import is_loopback

    key = os.environ.get(API_KEY)
    if args.api_key_file is not None:
        key = Path(args.api_key_file).read_text(encoding="utf-8", errors="replace").strip()
    if key is not None and not (key and key.isascii() and key.isprintable()):
        raise InputError(
            f"API key cannot be sent. --api-key-file or {API_KEY} has {len(key)} characters. It is "
            f"one line of visible ASCII. Write another."
        )
    if key is None and not is_loopback(args.host):
        raise InputError(
            f"no API key. Others reach {args.host}. A server that they reach must have one. Write "
            f"it into a file: --api-key-file FILE, or into {API_KEY}; or leave --host out."
        )
    return key


def _run(
    args: argparse.Namespace, overrides: list[str], api_key: str | None, processes: Processes
) -> None:
    """Loads the model and serves it; process 0 alone has the address."""
    from moejax.serve.endpoint.server import listen
    from moejax.serve.endpoint.worker import follow, warm_up

    console = screen(stderr=True, quiet=not processes.first)
    chosen = choose_model(args, overrides, processes)
    vocabulary = open_vocabulary(chosen, args.tokenizer, args.eos)
    chat, no_chat = _chat_prompts(args, chosen)
    positions = _positions(args, chosen, vocabulary)
    first = processes.first
    opened = processes.together(lambda: listen(args.host, args.port) if first else None)
    notes = [] if chat is not None else [f"no chat: {no_chat}"]
    for note in (*chosen.notes, *notes):
        console.print(note, highlight=False, soft_wrap=True)
    form = {"slots": args.slots, "positions": positions, "allowed": vocabulary.allowed}
    form["expert_slots"] = args.expert_slots
    programs, state, places = load_model(chosen, processes, console, **form)
    batch = Batch(programs, state, processes)

    def prepare(batch: Batch) -> None:
        warm_up(batch, programs, lambda case, of: _tell(console, case, of))
        if places is not None:  # what warmed it up is no load
            batch.count, batch.follow = places.count, places.follow

    if opened is None:
        with Interrupt():  # a launcher sends the signal to all, and process 0 says when to stop
            code = follow(batch, processes, prepare)
    else:
        model = ServedModel(
            name=args.model_name or Path(args.run).resolve().name,
            vocabulary=vocabulary,
            token_texts=TokenTexts(vocabulary.tokenizer),
            chat=chat,
            vocab_size=chosen.cfg.model.vocab_size,
            positions=positions,
            texts=programs.slots * programs.devices + args.queue,
        )
        code = _serve(args, model, batch, places, processes, prepare, opened, api_key)
    if code:
        raise KeyboardInterrupt


def _serve(
    args: argparse.Namespace,
    model: ServedModel,
    batch: Batch,
    places: Places | None,
    processes: Processes,
    prepare: Callable[[Batch], None],
    opened: socket,
    api_key: str | None,
) -> int:
    """Answers until a signal. Returns the exit code."""
    from moejax.serve.endpoint.app import Endpoint, is_loopback
    from moejax.serve.endpoint.metrics import Metrics
    from moejax.serve.endpoint.server import Server, url_of
    from moejax.serve.endpoint.worker import Worker

    metrics = Metrics(expert_slots=places is not None)
    worker = Worker(batch, processes, metrics, most=model.texts, places=places)
    loopback_only = is_loopback(args.host)
    endpoint = Endpoint(model, worker, metrics, api_key=api_key, loopback_only=loopback_only)

    def tell_address() -> None:
        body = json.dumps({"prompt": "Once", "max_tokens": 20})
        print(
            f"{model.name} is served at {url_of(opened)}. For example: curl "
            f"{url_of(opened)}/completions -d '{body}'",
            flush=True,
        )

    return Server(endpoint, opened, grace=args.grace).run(prepare, tell_address)


def _tell(console: Console, case: int, of: int) -> None:
    """Shows how far compilation is, at every shape."""
    if case % 3 == 1:  # sampling parameters of each kind
        console.print(f"compiling: case {case} of {of}", highlight=False)


def _chat_prompts(args: argparse.Namespace, chosen: Chosen) -> tuple[ChatPrompts | None, str]:
    """Opens the model's chat template. Returns None and the reason if it has none.

    Raises:
      InputError: if the template of the command line cannot be used.
    """
    try:
        return open_chat(chosen, args.tokenizer, args.chat_template), ""
    except InputError as error:
        if args.chat_template is not None:
            raise
        return None, str(error)


def _positions(args: argparse.Namespace, chosen: Chosen, vocabulary: Vocabulary) -> int:
    """Returns the positions of a text, its prompt included."""
    most = vocabulary.positions
    if args.positions is None:
        return min(POSITIONS, most or chosen.cfg.data.sequence_length)
    if most is not None and args.positions > most:
        raise InputError(
            f"`--positions` is out of range. Got {args.positions}. The model has {most}. Set fewer."
        )
    return args.positions
