"""The command `moejax generate`: texts continued by a checkpoint's model."""

import argparse
import json
import sys
import time
from typing import NamedTuple

from moejax.config.command_line import Parser
from moejax.config.load import split_overrides
from moejax.config.pattern import block_kinds
from moejax.errors import InputError, exit_code
from moejax.evaluate.checkpoint import FORWARD, Chosen, choose, read_weights
from moejax.runtime.processes import Processes
from moejax.runtime.start import join
from moejax.screen import screen
from moejax.serve.batch import Batch, Request
from moejax.serve.placing import check_overrides, place
from moejax.serve.programs import build_programs
from moejax.serve.prompts import Vocabulary, encode_prompts, open_vocabulary, read_prompts
from moejax.serve.samples import Sample, check_routing_file, draw_samples, write_routing
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
    sample: Sample


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
    add("--routing", metavar="FILE", help="write the experts of each token (.npz)")
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
    cfg = chosen.cfg
    if args.routing is not None:
        check_routing_file(args.routing, cfg.model.has_experts)
    for note in (*chosen.notes, *notes):
        console.print(note, highlight=False, soft_wrap=True)
    shown = _Stream(vocabulary, texts[0]) if args.stream and processes.first else None
    requests = [
        Request(ids, args.tokens, sampling, vocabulary.stops, n, routing=args.routing is not None)
        for n, ids in enumerate(prompts)
    ]
    samples, seconds = _continue(requests, chosen, vocabulary.allowed, processes, shown)
    found = [Text(text, sample) for text, sample in zip(texts, samples, strict=True)]
    if processes.first and args.routing is not None:
        layers = [n for n, kind in enumerate(block_kinds(cfg.model)) if kind.mlp == "moe"]
        write_routing(args.routing, samples, layers=layers, num_experts=cfg.moe.num_experts)
    if processes.first and args.json:
        _print_json(found, chosen, sampling, vocabulary, args.tokens)
    elif processes.first and shown is None:
        _print_texts(found, vocabulary)
    count = sum(len(sample.ids) for sample in samples)
    console.print(f"{count:,} tokens in {seconds:.1f} s, compilation included", highlight=False)


class _Stream:
    """Prints a text while it grows."""

    def __init__(self, vocabulary: Vocabulary, prompt: str):
        self._vocabulary, self._prompt, self._shown = vocabulary, prompt, ""

    def begin(self) -> None:
        """Prints the prompt."""
        print(self._prompt, end=self._vocabulary.between, flush=True)

    def show(self, sample: Sample) -> None:
        """Prints what is new."""
        text = self._vocabulary.continuation(sample.prompt_ids, sample.ids)
        # Bytes of an unfinished character wait for the others.
        if sample.ended or not text.endswith("\ufffd"):
            print(text[len(self._shown) :], end="\n" if sample.ended else "", flush=True)
            self._shown = text


def _continue(
    requests: list[Request],
    chosen: Chosen,
    allowed: int,
    processes: Processes,
    shown: _Stream | None,
) -> tuple[list[Sample], float]:
    """Starts devices, reads the weights, and draws the texts; returns them and the seconds."""
    placed = place(chosen, processes)
    programs = build_programs(
        *placed,
        slots=min(len(requests), placed.cfg.train.batch_sequences),
        positions=max(len(request.ids) + request.tokens for request in requests),
        allowed=allowed,
    )
    beside = programs.bytes_beside_weights()
    check_memory(programs.train_step, processes, gradients=False, beside=beside)
    state = programs.take(read_weights(chosen, programs.stored, processes))
    began = time.monotonic()
    batch = Batch(programs, state, processes)
    if shown is None:
        return draw_samples(batch, requests), time.monotonic() - began
    shown.begin()
    samples = draw_samples(batch, requests, lambda _, sample: shown.show(sample))
    return samples, time.monotonic() - began


def _print_texts(texts: list[Text], vocabulary: Vocabulary) -> None:
    """Prints each prompt and its continuation, with a line between."""
    for number, text in enumerate(texts):
        print(
            "----\n" * (number > 0)
            + text.prompt
            + vocabulary.between
            + vocabulary.continuation(text.sample.prompt_ids, text.sample.ids)
        )


def _print_json(
    texts: list[Text], chosen: Chosen, sampling: Sampling, vocabulary: Vocabulary, tokens: int
) -> None:
    """Prints one JSON object."""
    found = [
        {
            "prompt": prompt,
            "text": vocabulary.continuation(sample.prompt_ids, sample.ids),
            "prompt_tokens": len(sample.prompt_ids),
            "tokens": sample.ids,
            "ended": "eos" if len(sample.ids) < tokens else "length",
        }
        for prompt, sample in texts
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
