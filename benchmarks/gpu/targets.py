"""What a GPU is expected to reach, as shares of limits measured in the same run."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

Row = dict[str, Any]
FORWARD, BY_ROWS, BY_WEIGHTS = "forward", "data gradient", "weight gradient"
LEAST_OF_CUDNN = 0.8  # rate of attention that takes ranges over cuDNN's causal one
MOST_OF_HOST = 1.05  # of a step with arrays in the host's memory, where the planner says so too
MOST_OF_CHUNKS = 1.05  # time of four chunks over that of one, with nothing to hide


class Rates:
    """The timed rows of a run, and what they come to."""

    LIMITS = ("copy", "matmul bfloat16", "matmul e4m3", "launch")
    FUSED, MLP = "gate, up and SwiGLU", "expert MLP, forward + backward"
    IN_E4M3 = "forward, e4m3"
    PRODUCTS = (FORWARD, BY_ROWS, BY_WEIGHTS, FUSED, IN_E4M3, MLP)
    LAYER, STEP = "MoE layer, forward + backward", "train step"
    WHOLE = (LAYER, STEP)
    PLACES = "step, arrays on the host or not"
    IN_CHUNKS = ("layer in chunks, forward + backward", "layer in chunks, forward")
    ATTENTION = ("attention, forward + backward", "attention of stripes, forward + backward")
    OURS = (
        "mosaic",
        "moejax",
        "ranges, tokamax",
        "ranges, blocked",
        "reference",
        "blocked",
        "XLA",
    )  # the first that is there

    def __init__(self, rows: Iterable[Row]):
        self.rows = [row for row in rows if row.get("seconds")]

    def timed(
        self, *, section: str | None = None, operations: tuple[str, ...] | None = None
    ) -> Iterator[Row]:
        """Rows of a section, of some operations; None: of all."""
        for row in self.rows:
            wanted = operations is None or row["operation"] in operations
            if wanted and section in (None, row["section"]):
                yield row

    def order(self, implementation: str) -> tuple[int, str]:
        """Ours first."""
        known = implementation in self.OURS
        return (self.OURS.index(implementation) if known else len(self.OURS), implementation)

    def rate(self, row: Row, kind: str) -> float:
        """FLOP/s or bytes/s; kind: "flops" or "bytes"."""
        return row[kind] / float(np.median(row["seconds"]))

    def limit(self, kind: str, *, e4m3: bool = False) -> float | None:
        """The highest rate of the device that was measured."""
        product = "matmul e4m3" if e4m3 else "matmul bfloat16"
        operation = product if kind == "flops" else "copy"
        return max((self.rate(r, kind) for r in self.timed(operations=(operation,))), default=None)

    def share(self, row: Row, kind: str) -> float | None:
        """The rate over the limit."""
        limit = self.limit(kind, e4m3=row["operation"] == self.IN_E4M3)
        return None if limit is None else self.rate(row, kind) / limit

    def shown(self, row: Row) -> str:
        """The rate in words."""
        if "flops" in row:
            return f"{self.rate(row, 'flops') / 1e12:.1f} TFLOP/s"
        return f"{self.rate(row, 'bytes') / 1e12:.3f} TB/s" if "bytes" in row else ""


class Verdict(NamedTuple):
    """A target beside what was found; met is None where nothing was."""

    what: str
    bar: str
    found: str
    met: bool | None


def judge(rates: Rates) -> list[Verdict]:
    """All targets: the lowest of the rows that each is about counts."""
    tera = "{:.0f} TFLOP/s"
    found = [
        _lowest(
            f"grouped matmul, {name}, 512 rows or more", rates, _products(rates, name), bar, tera
        )
        for name, bar in ((FORWARD, 600), (BY_ROWS, 600), (BY_WEIGHTS, 500))
    ]
    found.append(_beside_torch(rates))
    moves = (("permute", "permute"), ("unpermute", "unpermute + weighted sum"))
    for what, operation in moves:
        rows = _ours(rates, lambda name, wanted=operation: name == wanted)
        found.append(_lowest(what, rates, rows, 3.4, "{:.2f} TB/s", kind="bytes"))
    found.append(_over_limit(rates))
    copies: tuple[tuple[str, Callable[[str], bool], float], ...] = (
        ("block quantise int8, fp8", lambda n: n.startswith("quantise") and "int4" not in n, 0.85),
        ("block quantise int4", lambda n: n.startswith("quantise") and "int4" in n, 0.8),
        ("dequantise-reduce int4", lambda n: n.startswith("dequantise-reduce 8 x int4"), 0.8),
    )
    for what, wanted, bar in copies:
        found.append(_share(what, rates, _ours(rates, wanted), bar, "bytes", "copy"))
    for model, bar in (("Mixtral", 0.55), ("Qwen3", 0.35)):
        rows = [r for r in rates.timed(operations=(rates.LAYER,)) if r["case"].startswith(model)]
        what = f"MoE layer, forward + backward, {model}"
        found.append(_share(what, rates, rows, bar, "flops", "matmul"))
    found.append(_beside_cudnn(rates))
    found += [_chunks(rates, operation) for operation in rates.IN_CHUNKS]
    found += _on_host(rates)
    rows = list(rates.timed(operations=(rates.STEP,)))
    return [*found, _share("train step", rates, rows, 0.45, "flops", "matmul")]


def _products(rates: Rates, operation: str) -> list[Row]:
    """Our rows with 512 rows an expert or more, uniform and skewed."""
    return [
        row
        for row in rates.timed(operations=(operation,))
        if row["implementation"] == "mosaic" and _rows_an_expert(row) >= 512
    ]


def _rows_an_expert(row: Row) -> int:
    return int(row["case"].partition(" rows an expert")[0].rpartition(" ")[2])


def _ours(rates: Rates, wanted: Callable[[str], bool]) -> list[Row]:
    return [
        row
        for row in rates.timed()
        if row["implementation"] in ("mosaic", "moejax") and wanted(row["operation"])
    ]


def _lowest(
    what: str, rates: Rates, rows: list[Row], bar: float, shown: str, *, kind: str = "flops"
) -> Verdict:
    """In units of 10^12."""
    target = f"at least {shown.format(bar)}"
    if not rows:
        return Verdict(what, target, "", None)
    rate, case = min((rates.rate(row, kind) / 1e12, row["case"]) for row in rows)
    return Verdict(what, target, f"{shown.format(rate)} ({case})", rate >= bar)


def _share(what: str, rates: Rates, rows: list[Row], bar: float, kind: str, limit: str) -> Verdict:
    """Of the measured limit; of several cases the lowest."""
    target = f"at least {bar:.0%} of the measured {limit}"
    shares = [(rates.share(row, kind), row["case"]) for row in rows]
    known = [(share, case) for share, case in shares if share is not None]
    if not known:
        return Verdict(what, target, "", None)
    share, case = min(known)
    return Verdict(what, target, f"{share:.0%} ({case})", share >= bar)


def _over_limit(rates: Rates) -> Verdict:
    """Permute and quantise: time over that of its bytes at the copy's rate."""
    what, target = "permute + quantise", "at most 1.25 x its bytes at the copy's rate"
    rows = _ours(rates, lambda name: name.startswith("permute + quantise"))
    times = [(1 / share, row["case"]) for row in rows if (share := rates.share(row, "bytes"))]
    if not times:
        return Verdict(what, target, "", None)
    time, case = max(times)
    return Verdict(what, target, f"{time:.2f} x ({case})", time <= 1.25)


def over_one_chunk(rates: Rates, operation: str) -> dict[str, dict[str, float]]:
    """By case, the median over rounds of the time over that of one chunk, by number of chunks."""
    cases: dict[str, dict[str, Row]] = {}
    for row in rates.timed(operations=(operation,)):
        cases.setdefault(row["case"], {})[row["implementation"]] = row
    return {
        case: {
            name: float(np.median(np.divide(row["seconds"], found["1 chunk"]["seconds"])))
            for name, row in found.items()
        }
        for case, found in cases.items()
        if "1 chunk" in found
    }


def _chunks(rates: Rates, operation: str) -> Verdict:
    """Four chunks over one where no wire hides behind them; of several cases the highest."""
    what, target = f"4 chunks, {operation}", f"at most {MOST_OF_CHUNKS} x one chunk"
    found = over_one_chunk(rates, operation)
    ratios = [(ratio["4 chunks"], case) for case, ratio in found.items() if "4 chunks" in ratio]
    if not ratios:
        return Verdict(what, target, "", None)
    ratio, case = max(ratios)
    return Verdict(what, target, f"{ratio:.3f} x ({case})", ratio <= MOST_OF_CHUNKS)


def over_device(rates: Rates) -> dict[str, tuple[float, float]]:
    """By what lies on the host: the step's time over that without, measured and predicted."""
    rows = {
        (row["case"], row["implementation"]): row for row in rates.timed(operations=(rates.PLACES,))
    }
    found = {}
    for (case, place), host in rows.items():
        device = rows.get((case, "device"))
        if place == "host" and device is not None:
            measured = float(np.median(np.divide(host["seconds"], device["seconds"])))
            found[case] = measured, host["predicted"] / device["predicted"]
    return found


def _on_host(rates: Rates) -> list[Verdict]:
    """Steps with arrays on the host; not judged where the planner says that copies take longer."""
    verdicts = []
    for name in ("optimizer", "residuals"):
        what, bar = f"step with {name} on the host", f"at most {MOST_OF_HOST} x, if so predicted"
        if name not in (ratios := over_device(rates)):
            verdicts.append(Verdict(what, bar, "", None))
            continue
        measured, predicted = ratios[name]
        met = measured <= MOST_OF_HOST if predicted <= MOST_OF_HOST else None
        verdicts.append(Verdict(what, bar, f"{measured:.3f} x, predicted {predicted:.3f} x", met))
    return verdicts


def _beside_cudnn(rates: Rates) -> Verdict:
    """Attention to ranges over cuDNN's causal form, by round; of several lengths the lowest."""
    what, target = "attention to ranges, causal", f"at least {LEAST_OF_CUDNN} x cuDNN's rate"
    ours: dict[str, list[float]] = {}
    theirs: dict[str, list[float]] = {}
    for row in rates.timed(operations=rates.ATTENTION[:1]):
        (theirs if row["implementation"] == "cuDNN" else ours)[row["case"]] = row["seconds"]
    both = ours.keys() & theirs.keys()
    ratios = [(float(np.median(np.divide(theirs[x], ours[x]))), x) for x in both]
    if not ratios:
        return Verdict(what, target, "", None)
    ratio, case = min(ratios)
    return Verdict(what, target, f"{ratio:.2f} x ({case})", ratio >= LEAST_OF_CUDNN)


def _beside_torch(rates: Rates) -> Verdict:
    """Ours over the faster of torch's two forms, by round, in the same case."""
    what = "grouped matmul beside torch._grouped_mm, 512 rows or more"
    ratios = []
    for operation in (FORWARD, BY_ROWS, BY_WEIGHTS):
        for row in _products(rates, operation):
            others = [
                other["seconds"]
                for other in rates.timed(section=row["section"], operations=(operation,))
                if other["case"] == row["case"] and other["implementation"].startswith("torch")
            ]
            if others:
                best = np.min(np.array(others), axis=0)
                ratio = float(np.median(best / np.array(row["seconds"])))
                ratios.append((ratio, f"{operation}, {row['case']}"))
    if not ratios:
        return Verdict(what, "never below", "", None)
    ratio, case = min(ratios)
    return Verdict(what, "never below", f"{ratio:.2f} x torch's rate ({case})", ratio >= 1)
