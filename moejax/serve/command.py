"""The command `moejax generate`: texts continued by a checkpoint's model."""

import argparse
import json
import sys
import time
from typing import NamedTuple

from moejax.config.command_line import Parser
from moejax.config.load import split_overrides
from moejax.errors import InputError, exit_code
from moejax.evaluate.checkpoint import FORWARD, Chosen, choose, read_weights
from moejax.runtime.processes import Processes
from moejax.runtime.start import join
from moejax.screen import screen
from moejax.serve.batch import Batch, Request, generate
from moejax.serve.placing import check_overrides, place
from moejax.serve.programs import build_programs
from moejax.serve.prompts import Vocabulary, encode_prompts, open_vocabulary, read_prompts
from moejax.serve.sampling import Sampling
from moejax.train.records.summary import check_memory
from moejax.train.start import check_same_config, check_simulated_devices

EPILOG = """\
examples:
  moejax generate --run runs/tiny --prompt "def " --tokens 80 --stream
  moejax generate --run imported/olmoe --prompts questions.txt --top-p 0.95
  moejax generate --run runs/books --prompt "Once" --config.mesh.tensor=2
  moejax generate --run runs/olmoe_chat --chat --prompt "What is a mesh?"

A text ends at the token that ends documents, or after --tokens. With --chat
the model's chat template writes the prompt. A continuation depends neither on
other prompts nor on the mesh (but for the last bits of logits).
Exit codes: 0 done, 1 logits are not finite, 2 bad input, 130 stopped.
"""


class Text(NamedTuple):
    """A prompt and its continuation."""

    prompt: str
    prompt_ids: list[int]
    ids: list[int]


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the flags."""
    command = Parser(
        prog="moejax generate",
        description="Continues texts, with a cache of keys and values.",
        epilog=EPILOG,
    )
    add = command.add_argument
    add("--run", metavar="DIR", required=True, help="a run directory, or an imported checkpoint")
    add("--step", type=int, metavar="N", help="its checkpoint of step N (default: the newest)")
    prompts = command.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", metavar="TEXT", help="text to continue")
    prompts.add_argument(
        "--prompts", metavar="FILE", help="texts to continue: lines of a file that are not blank"
    )
    add("--chat", action="store_true", help="prompts are messages of a user; show the answers")
    add("--chat-template", metavar="FILE", help="a Jinja template (default: the model's)")
    add("--tokens", type=int, default=128, metavar="N", help="most tokens of each (default: 128)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0: the likeliest (default)")
    add("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens")
    add(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="then from the likeliest tokens of total probability P",
    )
    add(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="then from those that are at least P times as likely as the likeliest",
    )
    add("--seed", type=int, default=0, metavar="S", help="seed of the draws (default: 0)")
    add("--stream", action="store_true", help="print the text of --prompt while it grows")
    add("--tokenizer", metavar="FILE", help="a tokenizer.json (default: the model's)")
    add("--eos", metavar="NAME", help="token (or id) that ends a text; with --tokenizer")
    add("--json", action="store_true", help="print one JSON object")
    add("--config.FIELD", metavar="VALUE", dest="_", help="override a setting of the run")
    add("--debug", action="store_true", help="show tracebacks of bad input")
    return command


def main(argv: list[str] | None = None) -> int:
    """Runs the command. Returns the exit code."""
    rest, overrides = split_overrides(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(rest)

    def run() -> None:
        sampling = Sampling(args.temperature, args.top_k, args.top_p, args.min_p, args.seed)
        sampling.check()
        _check_flags(args)
        with join() as processes:
            _run(args, sampling, overrides, processes)

    return exit_code(run, stopped="nothing was changed", debug=args.debug, files=True)


def _check_flags(args: argparse.Namespace) -> None:
    """Refuses flags that are out of range or contradict each other."""
    if args.tokens < 1:
        raise InputError(
            f"`--tokens` is out of range. Got {args.tokens}. It is at least 1. Raise it."
        )
    if args.chat_template is not None and not args.chat:
        raise InputError(
            f"`--chat-template` has no effect. Got {args.chat_template!r} without --chat. It "
            f"writes messages of a user. Add --chat, or leave it out."
        )
    if args.stream and (args.json or args.prompt is None):
        other = "--json" if args.json else "--prompts"
        raise InputError(
            f"`--stream` has no effect with `{other}`. It shows one text while it grows. Leave one "
            f"of them out."
        )


def _run(
    args: argparse.Namespace, sampling: Sampling, overrides: list[str], processes: Processes
) -> None:
    """Reads and continues the prompts, and prints; process 0 alone prints."""
    console = screen(stderr=True, quiet=not processes.first)
    check_overrides(overrides)
    texts = read_prompts(args.prompt, args.prompts)
    chosen = choose(args.run, args.step, overrides, processes, FORWARD)
    check_simulated_devices(chosen.cfg)
    check_same_config(chosen.cfg, processes)
    vocabulary = open_vocabulary(
        chosen, args.tokenizer, args.eos, chat=args.chat, template=args.chat_template
    )
    prompts, notes = encode_prompts(texts, vocabulary, chosen.cfg, args.tokens)
    for note in (*chosen.notes, *notes):
        console.print(note, highlight=False, soft_wrap=True)
    wanted = [Text(text, ids, []) for text, ids in zip(texts, prompts, strict=True)]
    stream = args.stream and processes.first
    seconds = _continue(wanted, chosen, sampling, vocabulary, args.tokens, processes, stream)
    if processes.first and args.json:
        _print_json(wanted, chosen, sampling, vocabulary, args.tokens)
    elif processes.first and not stream:
        _print_texts(wanted, vocabulary)
    count = sum(len(text.ids) for text in wanted)
    console.print(f"{count:,} tokens in {seconds:.1f} s, compilation included", highlight=False)


def _continue(
    texts: list[Text],
    chosen: Chosen,
    sampling: Sampling,
    vocabulary: Vocabulary,
    tokens: int,
    processes: Processes,
    stream: bool,
) -> float:
    """Starts devices, reads the weights, and appends tokens to the texts; returns the seconds."""
    placed = place(chosen, processes)
    programs = build_programs(
        *placed,
        slots=min(len(texts), placed.cfg.train.batch_sequences),
        positions=max(len(text.prompt_ids) for text in texts) + tokens,
        allowed=vocabulary.allowed,
    )
    beside = programs.bytes_beside_weights()
    check_memory(programs.train_step, processes, gradients=False, beside=beside)
    state = programs.take(read_weights(chosen, programs.stored, processes))
    begin, shown, first = time.monotonic(), "", texts[0]
    if stream:
        print(first.prompt, end=vocabulary.between, flush=True)
    requests = [
        Request(text.prompt_ids, tokens, sampling, vocabulary.stops, number)
        for number, text in enumerate(texts)
    ]
    for number, token in generate(Batch(programs, state, processes), requests):
        texts[number].ids.append(token.id)
        text = vocabulary.continuation(first.prompt_ids, first.ids) if stream else ""
        # Bytes of an unfinished character wait for the others.
        if stream and not text.endswith("\ufffd"):
            print(text[len(shown) :], end="", flush=True)
            shown = text
    if stream:
        print(vocabulary.continuation(first.prompt_ids, first.ids)[len(shown) :])
    return time.monotonic() - begin


def _print_texts(texts: list[Text], vocabulary: Vocabulary) -> None:
    """Prints each prompt and its continuation, with a line between."""
    for number, text in enumerate(texts):
        print(
            "----\n" * (number > 0)
            + text.prompt
            + vocabulary.between
            + vocabulary.continuation(text.prompt_ids, text.ids)
        )


def _print_json(
    texts: list[Text], chosen: Chosen, sampling: Sampling, vocabulary: Vocabulary, tokens: int
) -> None:
    """Prints one JSON object."""
    found = [
        {
            "prompt": text.prompt,
            "text": vocabulary.continuation(text.prompt_ids, text.ids),
            "prompt_tokens": len(text.prompt_ids),
            "tokens": text.ids,
            "ended": "eos" if len(text.ids) < tokens else "length",
        }
        for text in texts
    ]
    result = {
        "checkpoint": str(chosen.saved.path),
        "step": chosen.saved.step,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "seed": sampling.seed,
        "texts": found,
    }
    print(json.dumps(result, indent=1))
