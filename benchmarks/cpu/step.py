"""Seconds a step of moejax beside the same architecture in PyTorch, taken in turns.

Each side is a process of its own that builds its model, warms up and then waits. The two never run
at the same time: a short round of one, a short round of the other, the order swapped every round,
so that whatever drifts on the machine drifts for both. Only the ratio is claimed.

Run in moejax's environment; the PyTorch side has its own (see README.md).
"""

import argparse
import datetime
import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import RESULTS, Clock, describe, spread
from moejax.config.checks import check
from moejax.config.load import load_config, to_dict
from moejax.config.schema import Config
from moejax.errors import InputError

HERE = Path(__file__).parent
MAX_RATIO = 1.1  # what dropless moejax may take of PyTorch's time
WARMUP_STEPS = 3
PRODUCT_SIZE = 2048
MAX_IDLE_SHARE = 0.05  # CPU that a waiting side may use, of one CPU

# Both sides, by glibc, keep memory that they freed instead of handing it back to the system and
# faulting it in again each step: a setting that helps whichever side allocates more.
ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}


@dataclass
class Worker:
    """A side's process."""

    name: str
    process: subprocess.Popen
    facts: dict[str, Any]

    def ask(self, command: str) -> dict[str, Any]:
        """Sends a command and waits for its answer."""
        return _exchange(self.name, self.process, command)


def start_worker(name: str, python: str, script: str, request: dict, environment: dict) -> Worker:
    """Starts a side and waits until it is built."""
    try:
        process = subprocess.Popen(
            [python, str(HERE / "workers" / script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
    except OSError as error:
        raise InputError(
            f"cannot start the {name} side with `{python}`: {error.strerror}. It must be a Python "
            f"interpreter. Make the environment as benchmarks/README.md says."
        ) from None
    return Worker(name, process, _exchange(name, process, json.dumps(request)))


def _exchange(name: str, process: subprocess.Popen, line: str) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    answer = ""
    try:
        print(line, file=process.stdin, flush=True)
        answer = process.stdout.readline()
    except BrokenPipeError:
        pass  # It ended: its exit code follows.
    if not answer:
        raise RuntimeError(
            f"The {name} side ended with exit code {process.wait()}; its own message is above."
        )
    return json.loads(answer)


def mixtral_request(cfg: Config, threads: int) -> dict[str, Any]:
    """The PyTorch side's sizes and settings, from moejax's config."""
    model, optimizer = cfg.model, cfg.optimizer
    return {
        "mixtral": {
            "vocab_size": model.vocab_size,
            "hidden_size": model.width,
            "intermediate_size": cfg.moe.expert_hidden,
            "num_hidden_layers": model.num_layers,
            "num_attention_heads": model.num_heads,
            "num_key_value_heads": model.num_kv_heads,
            "head_dim": model.head_width,
            "num_local_experts": cfg.moe.num_experts,
            "num_experts_per_tok": cfg.moe.experts_per_token,
            "max_position_embeddings": cfg.data.sequence_length,
            "rms_norm_eps": model.norm_epsilon,
            "initializer_range": model.init_deviation,
            "tie_word_embeddings": model.tie_embeddings,
            "rope_parameters": {"rope_type": "default", "rope_theta": model.rope.theta},
            "router_aux_loss_coef": cfg.moe.router.balance_loss / cfg.moe.experts_per_token,
        },
        "adamw": {
            "lr": optimizer.learning_rate,
            "betas": [optimizer.beta1, optimizer.beta2],
            "eps": optimizer.epsilon,
            "weight_decay": optimizer.weight_decay,
        },
        "clip_norm": optimizer.clip_norm,
        "experts": "grouped_mm",
        "threads": threads,
        **_batch_request(cfg),
    }


def _batch_request(cfg: Config) -> dict[str, int]:
    return {
        "sequences": cfg.train.batch_sequences,
        "positions": cfg.data.sequence_length,
        "vocabulary": cfg.model.vocab_size,
    }


def check_alike(sides: list[Worker], warmups: list[dict], cfg: Config) -> None:
    """Raises unless both sides have as many parameters and start at the loss of a uniform guess."""
    sizes = {side.name: side.facts["parameters"] for side in sides}
    if len(set(sizes.values())) != 1:
        raise RuntimeError(f"The sides differ in parameters: {sizes}.")
    for side, answer in zip(sides, warmups, strict=True):
        first, uniform = answer["losses"][0], math.log(cfg.model.vocab_size)
        # Weights of deviation 0.02 give logits of deviation about 0.3, worth 0.3^2 / 2 nats.
        if abs(first - uniform) > 0.2:
            raise RuntimeError(f"{side.name} starts at loss {first:.3f}, not near {uniform:.3f}.")


def measure(sides: list[Worker], *, rounds: int, steps: int, cpus: list[int]) -> dict[str, Any]:
    """Takes turns; returns each side's seconds by round, and what else used the CPUs meanwhile."""
    answers: dict[str, list[dict]] = {side.name: [] for side in sides}
    clock = Clock(cpus)
    for number in range(rounds):
        for side in sides if number % 2 == 0 else sides[::-1]:
            answers[side.name].append(side.ask(f"run {steps}"))
    own = sum(a["cpu_seconds"] for side in answers.values() for a in side)
    idle_share = {
        # The first round's wait began before the rounds did.
        name: sum(a["idle_cpu_seconds"] for a in side[1:])
        / max(sum(a["idle_seconds"] for a in side[1:]), 1e-9)
        for name, side in answers.items()
    }
    return {
        "answers": answers,
        "waiting_cpu_share": idle_share,
        "others_cpu_share": clock.others_share(own),
    }


def compare(answers: dict[str, list[dict]]) -> dict[str, Any]:
    """Spread of each side's seconds, ratio of the medians, and spread of the ratios by round."""
    seconds = {name: [a["seconds"] for a in side] for name, side in answers.items()}
    flat = {name: [s for one in side for s in one] for name, side in seconds.items()}
    by_round = [
        sum(ours) / sum(theirs)
        for ours, theirs in zip(seconds["moejax"], seconds["pytorch"], strict=True)
    ]
    spreads = {name: spread(side) for name, side in flat.items()}
    return {
        "seconds": spreads,
        "ratio_of_medians": spreads["moejax"]["median"] / spreads["pytorch"]["median"],
        "ratio_by_round": spread(by_round),
        "ratios": by_round,
        "all_seconds": seconds,
        "last_loss": {name: side[-1]["losses"][-1] for name, side in answers.items()},
        "peak_bytes": {name: side[-1]["peak_bytes"] for name, side in answers.items()},
    }


def time_alternative(torch_side: Worker, experts: str, steps: int) -> dict[str, Any]:
    """Times PyTorch with other experts, after the comparison, for information."""
    torch_side.ask(f"experts {experts}")
    torch_side.ask("run 2")
    return spread(torch_side.ask(f"run {steps}")["seconds"])


def run(args: argparse.Namespace, cfg: Config, cpus: list[int]) -> dict[str, Any]:
    """Runs everything and returns the result."""
    threads = len(cpus)
    environment = os.environ | ALLOCATOR | {"OMP_NUM_THREADS": str(threads)}
    ours = {"config": to_dict(cfg), **_batch_request(cfg)}
    theirs = mixtral_request(cfg, threads)
    started: list[Worker] = []
    try:
        for name, python, request in (
            ("moejax", sys.executable, ours),
            ("pytorch", args.torch_python, theirs),
        ):
            script = f"{'torch' if name == 'pytorch' else name}_step.py"
            started.append(start_worker(name, python, script, request, environment))
        check_alike(started, [side.ask(f"run {WARMUP_STEPS}") for side in started], cfg)
        measured = measure(started, rounds=args.rounds, steps=args.steps, cpus=cpus)
        products = {
            side.name: side.ask(f"multiply {PRODUCT_SIZE}")["flops_per_second"] for side in started
        }
        alternative = time_alternative(started[1], "eager", 2 * args.steps)
    finally:
        for side in started:
            side.process.kill()
    return {
        "question": "seconds a step of moejax beside the same architecture in PyTorch",
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "rounds": args.rounds,
        "steps_per_round": args.steps,
        "machine": describe(cpus),
        "environment": ALLOCATOR,
        "sides": {side.name: side.facts for side in started},
        "config": ours["config"],
        "pytorch_request": theirs,
        **compare(measured.pop("answers")),
        **measured,
        "product_flops_per_second": products,
        "pytorch_loop_over_experts_seconds": alternative,
    }


def remarks(result: dict[str, Any]) -> list[str]:
    """What makes a result doubtful."""
    found = []
    others = result["others_cpu_share"]
    if others is None or others > MAX_IDLE_SHARE:
        share = "an unknown share" if others is None else f"{others:.0%}"
        found.append(f"Other processes used {share} of the CPUs meanwhile: repeat on an idle one.")
    for name, share in result["waiting_cpu_share"].items():
        if share > MAX_IDLE_SHARE:
            found.append(f"The {name} side used {share:.0%} of a CPU while it should have waited.")
    return found


def to_markdown(result: dict[str, Any]) -> str:
    """A page with one table."""
    seconds, sides, machine = result["seconds"], result["sides"], result["machine"]
    ratio, by_round = result["ratio_of_medians"], result["ratio_by_round"]
    rates, flops = result["product_flops_per_second"], sides["moejax"]["flops_per_step"]
    labels = {"moejax": "moejax, dropless", "pytorch": "PyTorch, grouped_mm experts"}
    rows = [
        f"| {labels[name]} | {s['median']:.3f} | {s['quartile_1']:.3f} - {s['quartile_3']:.3f} "
        f"| {s['minimum']:.3f} | {flops / rates[name]:.3f} |"
        for name, s in seconds.items()
    ]
    verdict = "holds" if ratio <= MAX_RATIO else "is missed"
    versions = [
        f"* {name}: " + ", ".join(f"{package} {v}" for package, v in side["versions"].items())
        for name, side in sides.items()
    ]
    count = result["rounds"] * result["steps_per_round"]
    lines = [
        "# Seconds a step, beside PyTorch",
        "",
        f"moejax takes **{ratio:.2f} x** PyTorch's time (ratio of medians; by round: median "
        f"{by_round['median']:.2f}, quartiles {by_round['quartile_1']:.2f} to "
        f"{by_round['quartile_3']:.2f}, range {by_round['minimum']:.2f} to "
        f"{by_round['maximum']:.2f}). The bar of at most {MAX_RATIO} x {verdict}. Profile, "
        "bounds and what was tried: [docs/log.md](../../docs/log.md).",
        "",
        "| side | median (s) | quartiles (s) | minimum (s) | its matrix products alone (s) |",
        "|---|---|---|---|---|",
        *rows,
        "",
        f"{count} steps a side in {result['rounds']} rounds, in turns. The last column is the "
        f"step's {flops / 1e9:.1f} GFLOP at the rate of one float32 product of {PRODUCT_SIZE} x "
        f"{PRODUCT_SIZE} ({rates['moejax'] / 1e9:.0f} and {rates['pytorch'] / 1e9:.0f} GFLOP/s).",
        f"For information: PyTorch with experts in a loop (`eager`) takes "
        f"{result['pytorch_loop_over_experts_seconds']['median']:.3f} s.",
        "",
        f"* when: {result['when']}",
        f"* machine: {machine['cpu']}, {machine['cpus_used']} of {machine['cpus_present']} CPUs, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB, {', '.join(machine['vector_units'])}; "
        f"{machine['system']}",
        *versions,
        *(f"* doubtful: {remark}" for remark in remarks(result)),
    ]
    return "\n".join(lines) + "\n"


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Returns the flags and the overrides of moejax's settings."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torch-python", required=True, help="Python with PyTorch, see README.md")
    parser.add_argument("--rounds", type=int, default=12, help="turns of each side")
    parser.add_argument("--steps", type=int, default=2, help="steps of one turn")
    parser.add_argument("--threads", type=int, default=2, help="CPUs that both sides may use")
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "step_vs_pytorch", help="without suffix"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="a setting of moejax"
    )
    args = parser.parse_args(argv)
    for name in ("rounds", "steps", "threads"):
        if getattr(args, name) < 1:
            raise InputError(f"--{name} is {getattr(args, name)}. It must be at least 1. Raise it.")
    return args, args.set


def pin(threads: int) -> list[int]:
    """Keeps this process, and those it starts, on that many CPUs; returns their numbers."""
    if not hasattr(os, "sched_setaffinity"):
        raise InputError(
            f"cannot pin processes to CPUs on {sys.platform}. Both sides must have the same ones. "
            f"Run this on Linux."
        )
    allowed = sorted(os.sched_getaffinity(0))
    if threads > len(allowed):
        raise InputError(
            f"--threads is {threads}, but this process may use {len(allowed)} CPUs. "
            f"Each thread needs its own. Lower --threads."
        )
    os.sched_setaffinity(0, allowed[:threads])
    return allowed[:threads]


def main(argv: list[str] | None = None) -> int:
    """Runs the command. Returns the exit code."""
    try:
        args, overrides = parse(argv)
        cfg = load_config(HERE / "step_config.py", overrides)
        check(cfg)
        result = run(args, cfg, pin(args.threads))
    except InputError as error:
        print(f"step: error: {error}", file=sys.stderr)
        return 2
    page = to_markdown(result)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    args.out.with_suffix(".md").write_text(page, encoding="utf-8")
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
