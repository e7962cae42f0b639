"""The command `moejax generate`: texts continued by a checkpoint's model."""

import argparse
import json
import sys
import time

from moejax.config.command_line import Parser
from moejax.config.load import split_overrides
from moejax.config.pattern import block_kinds
from moejax.errors import InputError, exit_code
from moejax.evaluate.checkpoint import Chosen
from moejax.runtime.processes import Processes
from moejax.runtime.start import join
from moejax.screen import screen
from moejax.serve.batch import Batch, Request
from moejax.serve.flags import (
    add_checkpoint,
    add_expert_slots,
    add_settings,
    add_tokenizer,
    check_slot_flags,
    choose_model,
    load_model,
)
from moejax.serve.prompts import Vocabulary, encode_prompts, open_vocabulary, read_prompts
from moejax.serve.samples import Sample, check_routing_file, draw_texts, write_routing
from moejax.serve.sampling import Sampling
from moejax.serve.texts import checked_stops

EPILOG = """\
examples:
  moejax generate --run runs/tiny --prompt "def " --tokens 80 --stream
  moejax generate --run imported/olmoe --prompts questions.txt --temperature 0.8
  moejax generate --run runs/books --prompt "Once" --config.mesh.tensor=2
  moejax generate --run runs/olmoe_chat --chat --prompt "What is a mesh?"

A text ends at the token that ends documents, before the first --stop, or after
--tokens. With --chat the model's chat template writes the prompt. A text
depends neither on others nor on the mesh (but for the last bits of logits).
Exit codes: 0 done, 1 logits are not finite, 2 bad input, 130 stopped.
"""


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the flags."""
    command = Parser(
        prog="moejax generate",
        description="Continues texts, with a cache of keys and values.",
        epilog=EPILOG,
    )
    add_checkpoint(command)
    add = command.add_argument
    prompts = command.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", metavar="TEXT", help="text to continue")
    prompts.add_argument(
        "--prompts", metavar="FILE", help="texts to continue: lines of a file that are not blank"
    )
    add("--chat", action="store_true", help="prompts are messages of a user; show the answers")
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
    add("--stop", metavar="TEXT", action="append", default=[], help="ends a text; may be repeated")
    add("--stream", action="store_true", help="print the text of --prompt while it grows")
    add("--json", action="store_true", help="print one JSON object")
    add("--routing", metavar="FILE", help="write the experts of each token (.npz)")
    add_expert_slots(command)
    add_tokenizer(command)
    add_settings(command)
    return command


def main(argv: list[str] | None = None) -> int:
    """Runs the command. Returns the exit code."""
    rest, overrides = split_overrides(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(rest)

    def run() -> None:
        sampling = Sampling(args.temperature, args.top_k, args.top_p, args.min_p, args.seed)
        sampling.check()
        _check_flags(args)
        check_slot_flags(args)
        checked_stops(args.stop)
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
    texts = read_prompts(args.prompt, args.prompts)
    chosen = choose_model(args, overrides, processes)
    vocabulary = open_vocabulary(
        chosen, args.tokenizer, args.eos, chat=args.chat, template=args.chat_template
    )
    prompts, notes = encode_prompts(texts, vocabulary, chosen.cfg, args.tokens)
    cfg = chosen.cfg
    if args.routing is not None:
        check_routing_file(args.routing, cfg.model.has_experts)
    for note in (*chosen.notes, *notes):
        console.print(note, highlight=False, soft_wrap=True)
    requests = [
        Request(ids, args.tokens, sampling, vocabulary.stops, n, routing=args.routing is not None)
        for n, ids in enumerate(prompts)
    ]
    stream = args.stream and processes.first
    shown = texts[0] + vocabulary.between if stream else None
    form = {
        "slots": min(len(requests), cfg.train.batch_sequences),
        "positions": max(len(request.ids) + request.tokens for request in requests),
        "allowed": vocabulary.allowed,
        "expert_slots": args.expert_slots,
    }
    programs, state, places = load_model(chosen, processes, console, **form)
    batch = Batch(programs, state, processes)
    if places is not None:
        batch.count, batch.follow = places.count, places.follow
    samples, seconds = _draw(requests, batch, vocabulary, args.stop, shown)
    if processes.first and args.routing is not None:
        layers = [n for n, kind in enumerate(block_kinds(cfg.model)) if kind.mlp == "moe"]
        write_routing(args.routing, samples, layers=layers, num_experts=cfg.moe.num_experts)
    if processes.first and args.json:
        _print_json(texts, samples, chosen, sampling)
    elif processes.first and not stream:
        _print_texts(texts, samples, vocabulary)
    count = sum(len(sample.ids) for sample in samples)
    console.print(f"{count:,} tokens in {seconds:.1f} s, compilation included", highlight=False)


def _draw(
    requests: list[Request],
    batch: Batch,
    vocabulary: Vocabulary,
    stops: list[str],
    shown: str | None,
) -> tuple[list[Sample], float]:
    """Draws the texts. Returns samples and seconds.

    Args:
      shown: printed in front of the only text, which is printed while it grows; None: nothing is.
    """
    began = time.monotonic()

    def show(_: int, characters: str) -> None:
        print(characters, end="", flush=True)

    if shown is not None:
        print(shown, end="", flush=True)
    grown = None if shown is None else show
    samples = draw_texts(batch, requests, vocabulary.tokenizer.decode, stops, grown)
    if shown is not None:
        print()
    return samples, time.monotonic() - began


def _print_texts(prompts: list[str], samples: list[Sample], vocabulary: Vocabulary) -> None:
    """Prints each prompt and its continuation, with a line between."""
    for number, (prompt, sample) in enumerate(zip(prompts, samples, strict=True)):
        print("----\n" * (number > 0) + prompt + vocabulary.between + sample.text)


def _print_json(
    prompts: list[str], samples: list[Sample], chosen: Chosen, sampling: Sampling
) -> None:
    """Prints one JSON object."""
    found = [
        {
            "prompt": prompt,
            "text": sample.text,
            "prompt_tokens": len(sample.prompt_ids),
            "tokens": sample.ids,
            "ended": sample.ended,
        }
        for prompt, sample in zip(prompts, samples, strict=True)
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
