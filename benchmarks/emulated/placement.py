"""How much sooner do batches end if hot experts have places on other hosts?

The engine of `moejax generate` on emulated hosts, all on two cores, on pieces of prompts: a batch
of 8 rows of 256 tokens, of two layers with experts. What tokens choose is given: their embeddings
are the routers' logits. Tables are planned from the load of the batches before (popularity), from
the ids of the batch's tokens and of those before them (path), from the batch's own load (oracle),
or stay as they are: every expert at home (static). Devices have one slot. All tables of a batch run
in turns, and give the same logits within 1e-5. Needs root, ip and tc.

Latency includes waiting. Batches come at times that are the same for all tables: a Poisson process
from a fixed seed, so many that static is busy for 0.8 of the time. They run in their order, one at
a time, for as long as was measured, and each when its weights have moved. Popularity is known when
the batch before has ended, and weights may move before the next one comes. Paths are known when it
has come. The oracle's weights move in no time: no table can do better.

Constructed choices: the link of one host brings it twice the mean of all. It is always the same
host ("steady"), or another one from batch to batch, of which ids tell ("turning"). Recorded
choices: those of a small model, trained without balance, on its own kind of text and on another
(benchmarks/recorded), in the order in which they were recorded, by 14 of its 28 pairs of layers,
one after the other.

    python -m benchmarks.emulated.placement --out benchmarks/results
"""

from collections.abc import Iterator, Sequence
from itertools import combinations
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np

from benchmarks.emulated.exchange import LAYER, Case
from benchmarks.emulated.prefill import MODEL
from benchmarks.emulated.record import record_cases
from benchmarks.machine import ROOT
from moejax.serve.experts.paths import Paths
from moejax.serve.experts.tables import PLANS, Cluster, device_loads, homes, plan_table

SHAPES = ((2, 4), (4, 2))  # hosts, devices of each
RATE = 200  # Mbit/s
CALL = (8, 256)  # rows, tokens of each
SIZES = {"model.width": 256, "moe.expert_hidden": 64}
KINDS = ("steady", "turning", "recorded")
TABLES = ("static", "popularity", "path", "oracle")
RECORDED = ROOT / "benchmarks" / "recorded" / "unbalanced.npz"
EXPERTS, CHOICES, LAYERS = 32, 4, 2  # of constructed choices
BATCHES, LEARNED = 40, 4  # that are timed; before them, that paths are learned from
RECENT = 4  # batches whose load is popularity
PLAN = "best"
SEED, BUSY = 0, 0.8  # of the times at which batches come; the share of them that static is busy
WORSE, ORACLE = 1.5, 1.1  # p95: wanted of static over path or popularity, and of them over oracle
# Lina's Table 1, 16 experts: the share of the exchange in inference. Section 2: 5.56 times.
LINA_SHARES, LINA_SPREAD, LINA_PUBLISHED = (0.274, 0.325), 5.56, 1.63


class Told(NamedTuple):
    """What is known of a batch's tokens before it runs, [N, S], and their choices, [N, L, K]."""

    known_NS: np.ndarray
    expert_NLK: np.ndarray


def sequences(kind: str, hosts: int) -> list[list[Told]]:
    """Returns batches that follow each other, `learned(kind)` of each to learn from."""
    if kind == "recorded":
        told = recorded()
        chosen = list(combinations(range(told[0].expert_NLK.shape[1]), LAYERS))[::2]
        return [
            [one._replace(expert_NLK=one.expert_NLK[:, layers]) for one in told]
            for layers in chosen
        ]
    random = np.random.default_rng(0)
    ids, tokens = 64, CALL[0] * CALL[1]
    each = EXPERTS // hosts
    # So many ids choose the hot host that it gets twice the mean load.
    host_I = [
        np.where(np.arange(ids) < ids * 2 // hosts, 0, 1 + np.arange(ids) % max(1, hosts - 1))
        for _ in range(LAYERS)
    ]
    host_IL = np.stack([random.permutation(x) for x in host_I], axis=1)
    host_ILK = np.concatenate([(host_IL + hot) % hosts for hot in range(hosts)])[:, :, None]
    order = random.random((len(host_ILK), LAYERS, each)).argsort(axis=2)[:, :, :CHOICES]
    expert_ILK = host_ILK * each + order
    found = []
    for _ in range(LEARNED + BATCHES):
        hot = 0 if kind == "steady" else int(random.integers(hosts))
        id_N = hot * ids + random.integers(ids, size=tokens)
        found.append(Told(id_N[:, None], expert_ILK[id_N]))
    return [found]


def recorded() -> list[Told]:
    """Returns recorded batches, of all layers: what is known are two ids."""
    with np.load(RECORDED, allow_pickle=False) as file:
        tokens_N, id_T, expert_TLK = (file[x] for x in ("tokens_N", "id_T", "expert_TLK"))
    ends, width = np.cumsum(tokens_N), int(file_length(tokens_N))
    rows = [np.arange(end - n, end - n + width) for end, n in zip(ends, tokens_N, strict=True)]
    texts = CALL[0] * CALL[1] // width
    found = []
    for first in range(0, len(rows) // texts * texts, texts):
        at_N = np.concatenate(rows[first : first + texts])
        before_N = np.maximum(at_N - 1, 0)
        known_NS = np.stack([id_T[before_N], id_T[at_N]], axis=1)
        found.append(Told(known_NS, expert_TLK[at_N].astype(int)))
    return found


def file_length(tokens_N: np.ndarray) -> int:
    """Returns the tokens that are taken of each text: a power of two, fewer than all have."""
    return 1 << (int(tokens_N.min()) - 1).bit_length() - 1


def learned(kind: str) -> int:
    """Returns how many batches run before the first that is timed."""
    return 1 if kind == "recorded" else LEARNED


def load_of(expert_NLK: np.ndarray, experts: int) -> np.ndarray:
    """Returns the choices of each expert, [L, E]."""
    return np.stack([np.bincount(x.ravel(), minlength=experts) for x in expert_NLK.swapaxes(0, 1)])


def expected(table: str, number: int, told: list[Told], experts: int) -> np.ndarray | None:
    """Returns the load that a table of batch `number` is planned from; None: it stays."""
    if table == "static":
        return None
    if table == "oracle":
        return load_of(told[number].expert_NLK, experts)
    before = told[:number]
    if table == "popularity":
        return np.sum([load_of(one.expert_NLK, experts) for one in before[-RECENT:]], axis=0)
    paths = Paths(experts)
    for one in before:
        paths.learn(*one)
    return paths.predict(told[number].known_NS)


def case(kind: str, hosts: int, devices: int) -> Case:
    """All tables of one kind of choices on some hosts."""
    shape = {"moe.num_experts": EXPERTS, "moe.experts_per_token": CHOICES}
    rounds = BATCHES
    if kind == "recorded":
        shape = recorded_shape()
        rounds = sum(len(told) - learned(kind) for told in sequences(kind, hosts))
    config = LAYER | MODEL | SIZES | shape | {"mesh.expert": hosts * devices, "mesh.nodes": hosts}
    config |= {"model.vocab_size": CALL[0] * CALL[1], "route": "split"}
    variants: dict[str, tuple[str, dict[str, Any]]] = {name: (kind, {}) for name in TABLES}
    return Case(kind, hosts, devices, RATE, config, CALL, variants, rounds=rounds)


def recorded_shape() -> dict[str, int]:
    """Returns experts and choices of the recorded model."""
    with np.load(RECORDED, allow_pickle=False) as file:
        return {
            "moe.num_experts": int(file["num_experts"]),
            "moe.experts_per_token": file["expert_TLK"].shape[2],
        }


def cases() -> Iterator[Case]:
    """Every case; recorded ones if there is a record."""
    for hosts, devices in SHAPES:
        for kind in KINDS:
            if kind != "recorded" or RECORDED.exists():
                yield case(kind, hosts, devices)


def arrivals(count: int, seconds: float) -> np.ndarray:
    """Returns the times at which batches come, [N]; so many seconds lie between two on average."""
    return np.cumsum(np.random.default_rng(SEED).exponential(seconds, count))


def latencies(
    arrives_N: Sequence[float] | np.ndarray,
    moved_N: Sequence[float],
    seconds_N: Sequence[float],
    *,
    ahead: bool = False,
) -> list[float]:
    """Returns the seconds from each batch's coming to its end; one runs at a time, in order.

    Args:
      moved_N: seconds that weights move before each.
      ahead: whether they move as soon as the batch before has ended, and not when both have
        happened: that, and this batch has come.
    """
    ended, found = 0.0, []
    for arrives, moved, seconds in zip(arrives_N, moved_N, seconds_N, strict=True):
        placed = moved + (ended if ahead else max(ended, arrives))
        ended = max(placed, arrives) + seconds
        found.append(float(ended - arrives))
    return found


def latencies_of(found: dict[str, Any]) -> dict[str, list[float]]:
    """Returns the latencies of every table of a case."""
    static = found["static"]["seconds"]
    arrives_N = arrivals(len(static), mean(static) / BUSY)
    tables = {}
    for name in TABLES:
        moved = [0.0] * len(static) if name == "oracle" else found[name]["moved"]
        seconds = found[name]["seconds"]
        tables[name] = latencies(arrives_N, moved, seconds, ahead=name == "popularity")
    return tables


def p95(seconds: list[float]) -> float:
    """Returns the 95th percentile."""
    return float(np.percentile(seconds, 95))


def rows(results: list[dict[str, Any]]) -> list[str]:
    """The table: a line for each case and table."""
    lines = [
        "| hosts | choices | table | a batch, s: median | latency, s: median | p95 | "
        "p95 of static over it | p95 over oracle's | overflow rounds a batch | "
        "moved before a batch, s: median, most | mean of static over it with moves | "
        "other programs |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for result in results:
        one, found = result["case"], result["found"]
        latency = latencies_of(found)
        static, oracle = p95(latency["static"]), p95(latency["oracle"])
        for name in TABLES:
            seconds, moved = found[name]["seconds"], found[name]["moved"]
            tail = p95(latency[name])
            texts = [
                f"{one['hosts']} x {one['devices']}",
                one["name"],
                name,
                f"{median(seconds):.3f}",
                f"{median(latency[name]):.3f}",
                f"{tail:.3f}",
                f"{static / tail:.2f} x",
                f"{tail / oracle:.2f} x",
                f"{sum(found[name]['rounds']) / len(seconds):.1f}",
                f"{median(moved):.2f}, {max(moved):.2f}",
                f"{sum(found['static']['seconds']) / (sum(seconds) + sum(moved)):.2f} x",
                f"{result['others']:.0%}",
            ]
            lines.append(f"| {' | '.join(texts)} |")
    return lines


def verdict(results: list[dict[str, Any]]) -> str:
    """Which bars are met, and whether paths beat popularity."""
    texts = []
    for result in results:
        one, found = result["case"], result["found"]
        tail = {name: p95(seconds) for name, seconds in latencies_of(found).items()}
        name = "popularity" if tail["popularity"] <= tail["path"] else "path"
        gain, loss = tail["static"] / tail[name], tail[name] / tail["oracle"]
        met = " and ".join(
            f"{'met' if good else 'missed'} ({text})"
            for good, text in (
                (gain >= WORSE, f"{gain:.2f} x static"),
                (loss <= ORACLE, f"{loss:.2f} x oracle"),
            )
        )
        over = tail["popularity"] / tail["path"]
        texts.append(
            f"- {one['hosts']} x {one['devices']}, {one['name']}: bars {met} by {name}. "
            f"Path over popularity: p95 {over:.2f} x as fast."
        )
    return "\n".join(texts)


def told_by_formula(hosts: int, devices: int) -> list[str]:
    """Busiest device over mean on recorded choices, by the source of the table; nothing is run."""
    told, experts = recorded(), recorded_shape()["moe.num_experts"]
    cluster, found = Cluster(hosts, devices, 1), {}
    last = told[0].expert_NLK.shape[1]
    for length in (1, 3):
        found[f"path of {length} layers before"] = [
            (_by_layers(told, n, layer, length, experts), n, layer)
            for n in range(1, len(told))
            for layer in range(3, last)
        ]
    for name in TABLES:
        found[name] = []
        for n in range(1, len(told)):
            load_LE = expected(name, n, told, experts)
            found[name] += [
                (None if load_LE is None else load_LE[layer], n, layer) for layer in range(3, last)
            ]
    lines = ["| table from | busiest device over mean: median | p95 |", "|---|---:|---:|"]
    for name, plans in found.items():
        busiest = []
        for load_E, n, layer in plans:
            true_E = load_of(told[n].expert_NLK, experts)[layer]
            table = homes(experts, cluster)
            table = table if load_E is None else plan_table(PLAN, load_E, cluster)
            load_P = device_loads(table, true_E, cluster)
            busiest.append(load_P.max() / load_P.mean())
        lines.append(f"| {name} | {median(busiest):.2f} | {p95(busiest):.2f} |")
    return lines


def _by_layers(told: list[Told], n: int, layer: int, length: int, experts: int) -> np.ndarray:
    """Lina's estimate: the load of a layer from the batch's first choices in layers before it."""
    paths, before = Paths(experts), slice(layer - length, layer)
    for one in told[:n]:
        paths.learn(one.expert_NLK[:, before, 0], one.expert_NLK[:, layer : layer + 1])
    return paths.predict(told[n].expert_NLK[:, before, 0])[0]


def lina() -> list[str]:
    """Lina's set-up by formula: 16 experts on 4 nodes of 4, loads in geometric steps."""
    load_E = np.random.default_rng(0).permutation(LINA_SPREAD ** (np.arange(16) / 15))
    cluster = Cluster(4, 4, 3)
    before = device_loads(homes(16, cluster), load_E, cluster)
    busiest = before.max() / before.mean()
    low, high = LINA_SHARES
    lines = [
        "| plan | busiest device over mean: before, after | only the exchange waits for it | "
        "all waits for it | published |",
        "|---|---:|---:|---:|---:|",
    ]
    for name in PLANS:
        load_P = device_loads(plan_table(name, load_E, cluster), load_E, cluster)
        after = load_P.max() / load_P.mean()
        least, most = (1 / (1 - s + s * after / busiest) for s in (low, high))
        texts = [
            name,
            f"{busiest:.2f}, {after:.2f}",
            f"{least:.2f} to {most:.2f} x",
            f"{busiest / after:.2f} x",
            f"{LINA_PUBLISHED} x",
        ]
        lines.append(f"| {' | '.join(texts)} |")
    return lines


def page(record: dict[str, Any]) -> str:
    """The results as Markdown."""
    machine = record["machine"]
    lines = [
        "# Places of experts in inference",
        "",
        *(__doc__ or "").strip().splitlines(),
        "",
        f"{record['date']}; {machine['cpu']}, {machine['cpus_used']} CPUs for all hosts together; "
        f"JAX {record['jax']}, Python {record['python']}. {RATE} Mbit/s a host; width "
        f"{SIZES['model.width']}, experts of hidden width {SIZES['moe.expert_hidden']}. Batches "
        f"come at random from seed {SEED}; at least {BATCHES} of a case. Other programs: their "
        "share of the CPUs while a case ran. Wanted where one link carries twice the mean: p95 of "
        f"the latency {WORSE} x better than static, and within {ORACLE} x of the oracle.",
        "",
        *rows(record["results"]),
        "",
        verdict(record["results"]),
        "",
    ]
    if RECORDED.exists():
        lines += [
            "Recorded choices by formula, on 2 x 4 devices: how busy the busiest device is with a "
            "table from each source. Paths of layers before are Lina's: they are known only in the "
            "middle of a batch, and weights would have to move there. Nothing is run.",
            "",
            *told_by_formula(2, 4),
            "",
        ]
    lines += [
        "Lina's set-up by formula: 16 experts on 16 devices, loads in geometric steps from least "
        f"to most popular ({LINA_SPREAD} x, its section 2), four experts a device. How much of a "
        "batch waits for the busiest device is not published: the exchange does "
        f"({LINA_SHARES[0]:.1%} to {LINA_SHARES[1]:.1%} of it, its Table 1), experts do too. "
        "Nothing is run, and weights move in no time.",
        "",
        *lina(),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Runs the cases and writes the results."""
    record_cases("placement", cases(), page, __doc__ or "", worker="placement")


if __name__ == "__main__":
    main()
