"""The cost of a change of hosts: seconds to the next step, and steps done again.

A run on four emulated hosts, of one device each, loses hosts and gets them back, round after
round. The planner chooses the mesh for what is there. Writes hosts.json and hosts.md. Needs root,
ip and tc; about three minutes a round.

    python -m benchmarks.emulated.hosts --out benchmarks/results
"""

import argparse
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.machine import stamp
from tests.faults.hosts import STEP, Hosts, emulated
from tests.integration.runs import write_config

EVERY = 50  # steps between checkpoints on disk
CONFIG = f"""
run_dir: RUN
model: {{vocab_size: 264, width: 64, num_layers: 2, num_heads: 4, num_kv_heads: 2, head_width: 16}}
moe: {{num_experts: 12, expert_hidden: 64}}
data: {{source: tokens, train_files: [TRAIN], eval_files: [EVAL], sequence_length: 64}}
plan: {{mode: auto}}
train: {{num_steps: 1000000, batch_sequences: 12, log_every: 1, eval_every: null, sample_tokens: 0}}
checkpoint: {{save_every: {EVERY}, keep: 3MEMORY}}
watchdog: {{silent_s: 6, step_s: 60}}
"""
PAGE = """\
# The cost of a change of hosts

`{command}` wrote this page. Four emulated hosts (network namespaces, links of {link}) of one
simulated device each, on one machine of {cores} cores, a supervisor each (`launch/host`); a small
MoE model whose mesh the planner chooses for the hosts that are there; a checkpoint on disk every
{every} steps{memory}. Seconds are from the event until the run shows a step again;
median, and the largest in brackets. The machine: {where}, JAX {jax}, {date}.

| event | times | seconds to the next step | steps again | without a new process |
|---|---:|---:|---:|---:|
{rows}

The first round is left out: there the planner meets three hosts for the first time, and programs
are compiled that later come from JAX's cache. It took {first}.
"""
Event = tuple[str, Callable[[Hosts], tuple[float, str]]]


def leaves(hosts: Hosts) -> tuple[float, str]:
    """Host 3 is asked to leave."""
    began = time.monotonic()
    hosts.leave(3)
    return began, "host 3 leaves"


def returns(number: int) -> Callable[[Hosts], tuple[float, str]]:
    """A host comes (back). Time counts from when the others know of it."""

    def event(hosts: Hosts) -> tuple[float, str]:
        since = len(hosts.lines)
        hosts.start(number)
        at = hosts.wait_for(f"on hosts .*: host {number} joins", since)
        return hosts.lines[at][0], f"host {number} joins"

    return event


def killed(hosts: Hosts) -> tuple[float, str]:
    """The training process of host 1 is killed."""
    began = time.monotonic()
    hosts.signal(1, signal.SIGKILL)
    return began, "host 1 ended by SIGKILL"


def lost(hosts: Hosts) -> tuple[float, str]:
    """Host 2 loses its supervisor and its process at once, without a word."""
    began = time.monotonic()
    hosts.lose(2)
    return began, "host 2 does not answer"


ROUND: tuple[Event, ...] = (
    ("a host leaves (SIGTERM to its supervisor)", leaves),
    ("a host returns after it left", returns(3)),
    ("kill -9 of one training process", killed),
    ("a host is lost (kill -9 of all on it)", lost),
    ("a host returns after it was lost", returns(2)),
)


def measure(hosts: Hosts, event: Event) -> dict[str, Any]:
    """Lets the run go on for a while, then the event happen. Returns what it cost."""
    name, happen = event
    hosts.wait_for_more(EVERY // 2)
    since = len(hosts.lines)
    began, text = happen(hosts)
    at = hosts.wait_for(text, since)
    before = _last_step(hosts, at)
    # The change is made when the run resumes; what is shown until then are steps before it.
    at = hosts.wait_for("resuming at step", at)
    when, step = hosts.next_step(at)
    restarted = "a fault" in hosts.text(since) or "ended by" in hosts.text(since)
    return {
        "event": name,
        "seconds": when - began,
        "again": max(before - step + 1, 0),
        "in_process": not restarted,
    }


def _last_step(hosts: Hosts, before: int) -> int:
    steps = [STEP.search(line) for _, _, line in hosts.lines[:before]]
    return max(int(found[1]) for found in steps if found)


def trials(rounds: int, link: str, memory: int | None) -> list[dict[str, Any]]:
    """Makes all rounds in one run."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        every = "" if memory is None else f", memory_every: {memory}"
        write_config(folder, CONFIG.replace("MEMORY", every), folder / "run")
        command = [sys.executable, "-m", "moejax.train", "--config", folder / "config.yaml"]
        with emulated(folder, 4, link, command) as hosts:
            for number in range(4):
                hosts.start(number)
            hosts.wait_for_step(EVERY + 5)
            for number in range(rounds + 1):
                for event in ROUND:
                    one = {"round": number, **measure(hosts, event)}
                    print(one, flush=True)
                    found.append(one)
    return found


def page(found: list[dict[str, Any]], facts: dict[str, Any]) -> str:
    """Returns the page of results."""
    rows, first = [], []
    for name, _ in ROUND:
        mine = [one for one in found if one["event"] == name]
        first.append(f"{mine[0]['seconds']:.0f} s")
        later = mine[1:]
        rows.append(
            f"| {name} | {len(later)} | {_spread(later, 'seconds', 1)} "
            f"| {_spread(later, 'again', 0)} | {sum(one['in_process'] for one in later)} |"
        )
    machine = facts["machine"]
    memory = facts["memory"]
    return PAGE.format(
        command=facts["command"],
        link=facts["link"],
        cores=machine["machine"]["cpus_used"],
        every=EVERY,
        memory="" if memory is None else f", copies in memory every {memory}",
        where=machine["machine"]["cpu"],
        rows="\n".join(rows),
        first=", ".join(first),
        jax=machine["jax"],
        date=machine["date"],
    )


def _spread(found: list[dict[str, Any]], name: str, digits: int) -> str:
    values = [one[name] for one in found]
    return f"{statistics.median(values):.{digits}f} ({max(values):.{digits}f})"


def main() -> None:
    """Makes the rounds and writes the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5, help="that count; 5 if not given")
    parser.add_argument("--link", default="1gbit", help="of each host; 1gbit if not given")
    parser.add_argument("--memory_every", type=int, help="steps between copies in memory")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    machine = stamp()
    found = trials(args.rounds, args.link, args.memory_every)
    command = f"python -m benchmarks.emulated.hosts --out benchmarks/results --rounds {args.rounds}"
    command += "" if args.memory_every is None else f" --memory_every {args.memory_every}"
    facts = {
        "machine": machine,
        "command": command,
        "link": args.link,
        "memory": args.memory_every,
        "trials": found,
    }
    (args.out / "hosts.json").write_text(json.dumps(facts, indent=1) + "\n")
    (args.out / "hosts.md").write_text(page(found, facts))


if __name__ == "__main__":
    main()
