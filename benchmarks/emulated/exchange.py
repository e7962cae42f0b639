"""How do the routes to the experts compare, in time and bytes, where links between hosts are slow?

Every case is one emulated cluster: hosts as network namespaces, one process a host, links shaped to
a rate, the fast link inside a host being its loopback. All variants of a case are built in the same
processes and run in turns. Needs root, ip and tc. Writes exchange.json and exchange.md.

    python -m benchmarks.emulated.exchange --out benchmarks/results
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.emulated.cluster import run_case
from benchmarks.emulated.exchange_page import page, table
from benchmarks.machine import RESULTS, stamp

HERE = Path(__file__).parent
RATES = (50, 100, 200, 400)  # Mbit/s
LAYER = {
    "mesh.replica": 1,
    "model.width": 512,
    "moe.num_experts": 8,
    "moe.experts_per_token": 2,
    "moe.expert_hidden": 128,
}
Variants = dict[str, tuple[str, dict[str, Any]]]


@dataclass(frozen=True)
class Case:
    """One run of the emulated cluster."""

    name: str
    hosts: int
    devices: int  # of each host
    rate: int | None  # Mbit/s; None: not shaped
    config: dict[str, Any]
    tokens: tuple[int, int]  # sequences, positions
    variants: Variants
    rounds: int = 3
    seldom: tuple[str, ...] = ()  # variants that run in every third round
    own_cores: bool = False  # of each host
    delay: str | None = None  # from a host to another; None: none


def cases() -> Iterator[Case]:
    """Every case, the quick ones first."""
    yield dropless()
    for hosts, devices in ((2, 4), (4, 2)):
        for top in (2, 8):
            yield payload(hosts, devices, top)
    for rate in RATES:
        yield all_to_all(rate)
    for rate in (*RATES, None):
        yield tensor(4, rate)
    for hosts, devices in ((2, 4), (4, 2)):
        yield merging(hosts, devices, top=8, rate=100)
    for rate in (50, None):
        yield merging(2, 4, top=8, rate=rate)
    for rate in (50, 100, None):
        yield pipeline(rate)
    for rate in RATES:
        yield train_step(rate)
    yield tensor(2, 100)


def all_to_all(rate: int) -> Case:
    """The first exchange of `tensor(4, rate)` alone."""
    routes = ("duplicate", "split")
    variants: Variants = {f"all-to-all {r}": ("all_to_all", {"route": r}) for r in routes}
    whole = tensor(4, rate)
    return replace(whole, name="all-to-all alone, tensor 4", variants=variants, rounds=9)


def tensor(size: int, rate: int | None) -> Case:
    """Two hosts of four devices, the tensor axis inside a host: what duplicates cost."""
    routes = ["duplicate", "split", "merge"]
    routes += ["two_level", "two_level_merge"] if size == 2 else []
    variants: Variants = {f"forward {route}": ("forward", {"route": route}) for route in routes[:2]}
    variants |= {route: ("both", {"route": route}) for route in routes}
    for chunks in (2, 4):
        settings = {"route": "split", "route_chunks": chunks}
        variants[f"split, {chunks} chunks"] = ("both", settings)
    mesh = {"mesh.expert": 8 // size, "mesh.tensor": size, "mesh.nodes": 2}
    return Case(f"tensor {size}", 2, 4, rate, LAYER | mesh, (8 // size, 256 * size), variants)


def merging(hosts: int, devices: int, top: int, rate: int | None) -> Case:
    """Whole experts on all devices: what one copy a device, and one copy a node, are worth."""
    routes = ("split", "merge", "two_level", "two_level_merge")
    trimmed = [(route, {"route": route, "route_trim": True}) for route in routes]
    variants: Variants = {f"forward {route}": ("forward", s) for route, s in trimmed}
    variants |= {route: ("both", settings) for route, settings in trimmed}
    mesh = {"mesh.expert": 8, "mesh.nodes": hosts, "moe.num_experts": 32}
    config = LAYER | mesh | {"moe.experts_per_token": top}
    return Case(f"merging, top {top}", hosts, devices, rate, config, (8, 512), variants)


def payload(hosts: int, devices: int, top: int) -> Case:
    """Many tokens, so that buckets are evenly filled: bytes against the least there can be."""
    config = LAYER | {"mesh.expert": 8, "mesh.nodes": hosts, "moe.num_experts": 32}
    config |= {"moe.experts_per_token": top, "model.width": 256, "moe.expert_hidden": 8}
    settings = {"route": "two_level_merge", "route_trim": True}
    variants: Variants = {"two_level_merge": ("forward", settings)}
    return Case(f"payload, top {top}", hosts, devices, None, config, (8, 16384), variants)


def pipeline(rate: int | None) -> Case:
    """Chunks, with experts that work and with experts that have next to nothing to do."""
    variants: Variants = {}
    for name, hidden in (("working", 1024), ("idle", 8)):
        for chunks in (1, 2, 4, 8):
            settings = {"route_chunks": chunks, "moe.expert_hidden": hidden}
            variants[f"forward {name}, {chunks}"] = ("forward", settings)
            variants[f"{name}, {chunks}"] = ("both", settings)
    mesh = {"mesh.expert": 2, "mesh.tensor": 4, "mesh.nodes": 2, "route": "split"}
    return Case("pipeline", 2, 4, rate, LAYER | mesh, (2, 2048), variants)


def dropless() -> Case:
    """One host: dropless at balanced load beside a capacity of 1.25."""
    variants: Variants = {
        "dropless": ("both", {}),
        "capacity 1.25": ("both", {"moe.capacity_factor": 1.25}),
    }
    config = LAYER | {"mesh.expert": 8, "moe.expert_hidden": 1024}
    return Case("dropless", 1, 8, None, config, (8, 1024), variants, rounds=20)


def train_step(rate: int) -> Case:
    """The whole train step of a language model of four layers."""
    routes: Variants = {
        "duplicate": ("step", {"route": "duplicate"}),
        "split": ("step", {"route": "split"}),
        "split, 2 chunks": ("step", {"route": "split", "route_chunks": 2}),
        "split, trimmed": ("step", {"route": "split", "route_trim": True}),
    }
    config = LAYER | {"mesh.expert": 2, "mesh.tensor": 4, "mesh.nodes": 2, "model.width": 256}
    config |= {"model.num_layers": 4, "model.num_heads": 8, "model.num_kv_heads": 8}
    config |= {"model.head_width": 32, "moe.expert_hidden": 512, "model.vocab_size": 512}
    config |= {"train.batch_sequences": 8, "data.sequence_length": 256}
    return Case("train step", 2, 4, rate, config, (8, 256), routes)


def run(case: Case, folder: Path, worker: str = "exchange") -> dict[str, Any]:
    """Runs a case by a script of workers/; returns for each variant what the hosts measured."""
    hosts = run_case(asdict(case), HERE / "workers" / f"{worker}.py", folder)
    found = {}
    for name in case.variants:
        sides = [host[name] for host in hosts]
        found[name] = dict(sides[0])
        # The slowest host's time, the busiest link's bytes.
        for list_name in ("seconds", "sent"):
            found[name][list_name] = list(
                map(max, zip(*(s[list_name] for s in sides), strict=True))
            )
    return found


def main() -> None:
    """Runs the cases and writes the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--only", default="", help="cases whose name starts with this")
    parser.add_argument(
        "--add", action="store_true", help="keep the cases that --out holds, and run the others"
    )
    args = parser.parse_args()
    chosen = [case for case in cases() if case.name.startswith(args.only)]
    results = []
    if args.add:
        results = json.loads((args.out / "exchange.json").read_text())["results"]
        held = {place(result["case"]) for result in results}
        chosen = [case for case in chosen if place(asdict(case)) not in held]
    with tempfile.TemporaryDirectory() as folder:
        for case in chosen:
            print(f"== {case.name}, {case.hosts} x {case.devices}, {case.rate} Mbit/s", flush=True)
            results.append({"case": asdict(case), "found": run(case, Path(folder))})
            for line in table(results[-1]):
                print(line, flush=True)
            write(results, args.out)


def place(case: dict[str, Any]) -> tuple:
    """What tells cases apart."""
    link = case["rate"], case.get("delay")
    return case["name"], case["hosts"], case["devices"], tuple(case["tokens"]), *link


def write(results: list[dict[str, Any]], folder: Path) -> None:
    """Writes what was measured so far, in the order of the cases."""
    order = [place(asdict(case)) for case in cases()]
    results = sorted(results, key=lambda result: order.index(place(result["case"])))
    record = {"results": results} | stamp()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "exchange.json").write_text(json.dumps(record, indent=1) + "\n")
    (folder / "exchange.md").write_text(page(record, __doc__ or ""))


if __name__ == "__main__":
    main()
