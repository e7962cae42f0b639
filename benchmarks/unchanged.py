"""Does a change leave what is computed as it was, to the bit?

For changes that move and rename. Works through the commands alone, so that it does not care where
modules are. Record with the code before and with the code after, on one machine, and compare:

    python -m benchmarks.unchanged record /tmp/before --code PATH/OF/A/CHECKOUT/BEFORE
    python -m benchmarks.unchanged record /tmp/after --old /tmp/before
    python -m benchmarks.unchanged compare /tmp/before /tmp/after

Recorded: losses, gradient norms and weights of 20 steps on four meshes, two routes, two codecs;
what a dry run says of each config; plans for known clusters; with --aot the collectives and peak
bytes of steps compiled for H200s (needs moejax[aot]). With --old the checkpoints, plan, topology
and tokens of another recording are read too: a run goes on from them, and must end as theirs did.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
TINY = "configs/tiny.py"
SMALL = {
    "model.num_layers": 2,
    "data.sequence_length": 64,
    "train.num_steps": 20,
    "train.log_every": 1,
    "train.eval_every": 10,
    "train.eval_batches": 2,
    "checkpoint.save_every": 10,
    "optimizer.warmup_steps": 5,
}
# Each axis and layout at least once.
MESHES = {
    "expert4_tensor2": (1, 1, 4, 2),
    "expert8": (1, 1, 8, 1),
    "fsdp2_expert2_tensor2": (1, 2, 2, 2),
    "replica2_expert2_tensor2": (2, 1, 2, 2),
}
AXES = ("mesh.replica", "mesh.fsdp", "mesh.expert", "mesh.tensor")
WAYS = {
    "split": {"route": "split", "route_chunks": 2},
    "two_level": {"route": "two_level_merge", "mesh.nodes": 2},
    "hybrid": {"compression.preset": "hybrid", "mesh.nodes": 2},
    "strong_micro": {"compression.preset": "strong", "mesh.nodes": 2, "train.micro_batches": 2},
}
PLANS = (
    ("mixtral_8x7b", "h200:8"),
    ("olmoe_1b_7b", "dgx_a100:4"),
    ("qwen3_30b_a3b", "tpu_v5p:1"),
)
COMPILED = (("olmoe_1b_7b", 1), ("olmoe_1b_7b", 2))
# In names of what is timed, and the folder of a run, which is another in each recording.
CHANGING = ("seconds", "time", "per_second", "share_of_peak", "_left", "run_dir")


def code() -> Path:
    """The checkout whose code runs."""
    return Path(os.environ["MOEJAX_CODE"])


def run(words: list[str], **env: str) -> str:
    """Runs a command of moejax; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=code(),
        env=os.environ | env | {"PYTHONPATH": str(code())},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    return done.stdout


def settings(values: dict[str, Any]) -> list[str]:
    """Values as words of a command line."""
    return [f"--config.{name}={value}" for name, value in values.items()]


def untimed(value: Any) -> Any:
    """A JSON value without what was timed."""
    if isinstance(value, list):
        return [untimed(one) for one in value]
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if not any(word in k for word in CHANGING)}
        return {k: untimed(v) for k, v in kept.items()}
    return value


def train(folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    """A run's records and weights."""
    run(["moejax.train", "--config", TINY, *settings(values | {"run_dir": folder})])
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {"records": [untimed(json.loads(line)) for line in lines], "state": state(folder)}


def state(folder: Path) -> dict[str, str]:
    """A digest of each array of a run's last checkpoint."""
    import numpy as np
    import orbax.checkpoint as ocp

    steps = [path for path in (folder / "checkpoints").iterdir() if path.name.isdigit()]
    last = max(steps, key=lambda path: int(path.name))
    found = {}
    for place in sorted(path.parent for path in last.rglob("_METADATA")):
        with ocp.PyTreeCheckpointer() as reader:
            tree = reader.metadata(place).item_metadata.tree
            kinds = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in _leaves(tree)}
            read = _leaves(reader.restore(place, restore_args=_like(tree, kinds)))
        found |= {place.name + name: _digest(np.asarray(x)) for name, x in read.items()}
    return found


def _leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict | list | tuple):
        return {prefix: tree}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    found: dict[str, Any] = {}
    for name, value in items:
        found |= _leaves(value, f"{prefix}/{name}")
    return found


def _like(tree: Any, values: dict[str, Any], prefix: str = "") -> Any:
    if isinstance(tree, dict):
        return {k: _like(v, values, f"{prefix}/{k}") for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        return [_like(v, values, f"{prefix}/{n}") for n, v in enumerate(tree)]
    return values[prefix]


def _digest(x: Any) -> str:
    text = f"{x.dtype} {x.shape} ".encode() + x.tobytes()
    return hashlib.sha256(text).hexdigest()


def values(mesh: str, way: str) -> dict[str, Any]:
    """The settings of a run."""
    return SMALL | dict(zip(AXES, MESHES[mesh], strict=True)) | WAYS[way]


def runs(folder: Path) -> dict[str, Any]:
    """Four ways on each of four meshes; the first mesh has all of them, the others one each."""
    cases = [(mesh, way) for mesh in MESHES for way in WAYS if mesh == next(iter(MESHES))]
    cases += list(zip([*MESHES][1:], [*WAYS][1:], strict=True))
    return {
        f"{mesh} {way}": train(folder / f"{mesh}_{way}", values(mesh, way)) for mesh, way in cases
    }


def dry_runs() -> dict[str, str]:
    """What a dry run says of each config."""
    found = {}
    for config in sorted((code() / "configs").glob("*.py")):
        words = ["--config", str(config.relative_to(code())), "--dry_run"]
        if config.stem != "tiny":
            words += settings({"data.source": "stdlib"})
        found[config.stem] = run(["moejax.train", *words], COLUMNS="200")
    return found


def plans(folder: Path) -> dict[str, Any]:
    """Plans for known clusters, and their prices."""
    folder.mkdir(exist_ok=True)
    found = {}
    for config, cluster in PLANS:
        out = folder / f"{config}.json"
        words = ["--config", f"configs/{config}.py", "--topology", cluster, "--out", str(out)]
        run(["moejax.plan", *words, "--free", "mesh,route_chunks", "--traces", "100"])
        found[f"{config} on {cluster}"] = json.loads(out.read_text())
    return found


def compiled() -> dict[str, Any]:
    """Collectives, order and peak bytes of steps that were compiled for H200s."""
    found = {}
    for config, nodes in COMPILED:
        words = ["--config", f"configs/{config}.py", "--nodes", str(nodes), "--json"]
        words += settings({"mesh.expert": 8, "model.num_layers": 2, "mesh.fsdp": nodes})
        said = json.loads(run(["moejax", "aot", *words]))
        found[f"{config} on {nodes}"] = untimed(said)
    return found


def files(folder: Path) -> dict[str, Any]:
    """A token file, a topology and a plan, written by the commands."""
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / "text.txt"
    text.write_text("".join(f"{n} tokens were sent to {n % 7} experts.\n" for n in range(50_000)))
    out = folder / "tokens"
    run(["moejax", "prepare", str(text), "--out", str(out), "--eval-fraction", "0", "--overwrite"])
    probe = ["probe", "--simulated-devices", "8", "--nodes", "2", "--quick", "--seconds", "5"]
    topology = folder / "topology.json"
    run(["moejax.plan", *probe, "--out", str(topology)])
    words = ["--config", TINY, "--topology", str(topology), "--free", "mesh"]
    run(["moejax.plan", *words, "--out", str(folder / "plan.json")])
    return {"tokens": _digest_of_file(folder / "tokens.train.bin")}


def _digest_of_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_old(old: Path, folder: Path) -> dict[str, Any]:
    """Reads another recording's files: checkpoint of step 10, tokens, topology, plan."""
    import shutil

    found = {}
    for case in sorted((old / "runs").iterdir()):
        again = folder / case.name
        shutil.copytree(case, again)
        shutil.rmtree(again / "checkpoints" / "20")
        mesh, way = _case(case.name)
        train(again, values(mesh, way))
        found[case.name] = state(again)
    here = old / "files"
    run(["moejax", "prepare", "--verify", str(here / "tokens.train.bin")])
    run(["moejax.plan", "--config", TINY, "--topology", str(here / "topology.json")])
    wanted = {name: x for name, x in SMALL.items() if "eval" not in name}
    wanted |= {"run_dir": folder / "planned", "plan": here / "plan.json", "train.num_steps": 10}
    wanted |= {"data.source": "tokens", "data.train_files": here / "tokens.train.bin"}
    run(["moejax.train", "--config", TINY, *settings(wanted)])
    return found


def _case(name: str) -> tuple[str, str]:
    return next((m, w) for m in MESHES for w in WAYS if name == f"{m}_{w}")


def compare(one: Any, other: Any, where: str = "") -> list[str]:
    """The places where two JSON values differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        names = sorted({*one, *other})
        parts = [compare(one.get(n), other.get(n), f"{where}/{n}") for n in names]
        return [line for part in parts for line in part]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        parts = [
            compare(a, b, f"{where}/{n}") for n, (a, b) in enumerate(zip(one, other, strict=True))
        ]
        return [line for part in parts for line in part]
    return [] if one == other else [f"{where}: {str(one)[:300]} -> {str(other)[:300]}"]


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    record = commands.add_parser("record")
    record.add_argument("out", type=Path)
    record.add_argument("--old", type=Path, help="another recording, whose files are read")
    record.add_argument("--code", type=Path, default=HERE, help="the checkout; default: this one")
    record.add_argument("--aot", action="store_true", help="compile for H200s, and nothing else")
    both = commands.add_parser("compare")
    both.add_argument("before", type=Path)
    both.add_argument("after", type=Path)
    args = parser.parse_args()
    if args.command == "compare":
        pairs = [(p, args.after / p.name) for p in sorted(args.before.glob("*.json"))]
        found = {p.stem: compare(*(json.loads(x.read_text()) for x in (p, q))) for p, q in pairs}
        for name, lines in found.items():
            print(f"{name}: {len(lines)} differences", *lines[:20], sep="\n  ")
        return 1 if any(found.values()) else 0
    os.environ["MOEJAX_CODE"] = str(args.code.resolve())
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    parts = (
        {"compiled": compiled}
        if args.aot
        else {
            "dry": dry_runs,
            "runs": lambda: runs(out / "runs"),
            "files": lambda: files(out / "files"),
            "plans": lambda: plans(out / "plans"),
        }
    )
    for name, make in parts.items():
        print(name, flush=True)
        (out / f"{name}.json").write_text(json.dumps(make(), indent=1, sort_keys=True))
    if args.old:
        states = {
            case: x["state"] for case, x in json.loads((args.old / "runs.json").read_text()).items()
        }
        wanted = {case.replace(" ", "_"): x for case, x in states.items()}
        if different := compare(wanted, read_old(args.old.resolve(), out / "old")):
            print(*different[:20], sep="\n")
            return 1
        print("old files are read, and runs from old checkpoints end as they did")
    return 0


if __name__ == "__main__":
    sys.exit(main())
