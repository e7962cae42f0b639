"""The results of `exchange.py` as a Markdown page."""

from collections.abc import Iterator
from statistics import median
from typing import Any

SearchResult = dict[str, dict[str, Any]]  # of each variant: seconds, sent, counted, ...
COLUMNS = (
    "variant",
    "speed",
    "seconds (range)",
    "of wire time",
    "MB sent",
    "sent / counted",
    "sent / least",
    "MB memory",
)


def page(record: dict[str, Any], question: str) -> str:
    """The whole page."""
    machine = record["machine"]
    lines = [
        "# Routes on the emulated cluster",
        "",
        *question.strip().splitlines(),
        "",
        f"{record['date']}; {machine['cpu']}, {machine['cpus_used']} CPUs for all hosts together; "
        f"JAX {record['jax']}, Python {record['python']}; rows are float32.",
        "",
        "Speed is a ratio, the median over rounds of the first variant's seconds over this one's; "
        "all-to-all, forward and both directions are each beside their own first. Wire time is the "
        "counted bytes over the link's rate. Sent is what the kernel counted on the busiest link, "
        "with headers and acknowledgements; counted is from the traced program, without the rounds "
        "of layers whose buckets overflow, as some do in the train step, whose router has just "
        "been drawn; least is each token once to each other host that needs it. Seconds are of "
        "this machine only.",
        "",
        "## In short",
        "",
        *(f"- {line}" for result in record["results"] for line in _short(result)),
    ]
    lines += ["", "## What bounds it", "", *_bounds(record["results"])]
    for result in record["results"]:
        lines += ["", f"## {_title(result['case'])}", "", *table(result)]
    return "\n".join(lines) + "\n"


def table(result: dict[str, Any]) -> Iterator[str]:
    """A case; speed is beside its first variant of the same kind."""
    case, found = result["case"], result["found"]
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---" * len(COLUMNS) + "|"
    first: dict[str, str] = {}
    for name, facts in found.items():
        base = first.setdefault(case["variants"][name][0], name)
        seconds, sent, counted = facts["seconds"], median(facts["sent"]), facts["counted"]
        kind, settings = case["variants"][name]
        if kind == "step" and settings.get("route_trim"):
            counted = 0  # how many rows travel is for the routing of each layer to say
        cells = [
            name,
            f"{_speed(found, base, name):.2f}",
            f"{median(seconds):.3f} ({min(seconds):.3f} to {max(seconds):.3f})",
            f"{_over_wire(case, facts):.2f}" if case["rate"] and counted else "",
            f"{sent / 1e6:.2f}",
            f"{sent / counted:.3f}" if counted else "",
            f"{sent / facts['least']:.3f}" if facts.get("least") else "",
            f"{facts['temporary'] / 1e6:.0f}",
        ]
        yield f"| {' | '.join(cells)} |"


def _title(case: dict[str, Any]) -> str:
    rate = f"{case['rate']} Mbit/s" if case["rate"] else "links not shaped"
    return f"{case['name']}: {case['hosts']} hosts x {case['devices']} devices, {rate}"


def _speed(found: SearchResult, base: str, name: str) -> float:
    """How many times as fast as `base`: the median over rounds, each with its own pair."""
    pairs = zip(found[base]["seconds"], found[name]["seconds"], strict=True)
    return median(b / s for b, s in pairs)


def _over_wire(case: dict[str, Any], facts: dict[str, Any]) -> float:
    return median(facts["seconds"]) * case["rate"] * 1e6 / (8 * facts["counted"])


def _short(result: dict[str, Any]) -> Iterator[str]:
    """What a case says, a line a question."""
    case, found = result["case"], result["found"]
    say = {
        "all-to-all": _all_to_all,
        "tensor": _tensor,
        "merging": _merging,
        "payload": _payload,
        "dropless": _dropless,
        "pipeline": _pipeline,
        "train": _train_step,
    }[case["name"].replace(",", " ").split()[0]]
    for line in say(case, found):
        yield f"{_title(case)}. {line}"


def _all_to_all(case: dict[str, Any], found: SearchResult) -> Iterator[str]:
    speed = _speed(found, "all-to-all duplicate", "all-to-all split")
    yield f"Split over duplicate: {speed:.2f} x ({speed / case['config']['mesh.tensor']:.2f} T)."


def _tensor(case: dict[str, Any], found: SearchResult) -> Iterator[str]:
    forward = _speed(found, "forward duplicate", "forward split")
    yield f"Split over duplicate, the layer forward: {forward:.2f} x."
    routes = [name for name, (kind, _) in case["variants"].items() if kind == "both"]
    yield _best(found, routes, "layer, both directions")


def _best(found: SearchResult, routes: list[str], what: str) -> str:
    best = max(routes, key=lambda name: _speed(found, "duplicate", name))
    return f"Best of the {what}: {best}, {_speed(found, 'duplicate', best):.2f} x over duplicate."


def _merging(case: dict[str, Any], found: SearchResult) -> Iterator[str]:
    for way, kind in (("forward", "forward "), ("both directions", "")):
        for copies, route in (("node", "two_level_merge"), ("device", "merge")):
            base, name = f"{kind}split", f"{kind}{route}"
            fewer = median(found[base]["sent"]) / median(found[name]["sent"])
            speed = _speed(found, base, name)
            yield (
                f"One copy a {copies}, {way}: {fewer:.2f} x fewer bytes, {speed:.2f} x as fast "
                f"({speed / fewer:.2f} of the bytes' ratio)."
            )


def _payload(case: dict[str, Any], found: SearchResult) -> Iterator[str]:
    facts = found["two_level_merge"]
    least, sent = facts["least"], median(facts["sent"])
    yield (
        f"Payload {facts['payload'] / least:.4f} x the least, metadata "
        f"{facts['metadata'] / least:.4f}, all that the kernel counted {sent / least:.4f}, which "
        f"is {sent / facts['counted']:.4f} of what was counted beforehand."
    )


def _dropless(case: dict[str, Any], found: SearchResult) -> Iterator[str]:
    dropless, capacity = found["dropless"], found["capacity 1.25"]
    yield (
        f"Dropless takes {1 / _speed(found, 'capacity 1.25', 'dropless'):.2f} x the time and "
        f"{dropless['temporary'] / capacity['temporary']:.2f} x the temporary memory of capacity "
        f"1.25."
    )


def _pipeline(case: dict[str, Any], found: SearchResult) -> Iterator[str]:
    if not case["rate"]:
        return
    for way, kind in (("forward", "forward "), ("both directions", "")):
        for experts in ("working", "idle"):
            by_chunks = {
                chunks: _over_wire(case, found[f"{kind}{experts}, {chunks}"])
                for chunks in (1, 2, 4, 8)
            }
            listed = ", ".join(f"{over:.2f} ({chunks})" for chunks, over in by_chunks.items())
            yield f"Time over wire time, {way}, experts {experts}, by chunks: {listed}."


def _train_step(case: dict[str, Any], found: SearchResult) -> Iterator[str]:
    base = found["duplicate"]
    share = base["exchanged"] * 8e-6 / case["rate"] / median(base["seconds"])
    best = _best(found, [name for name in found if name != "duplicate"], "whole step")
    yield f"All-to-all is {share:.0%} of duplicate's step by its wire time. {best}"


def _bounds(results: list[dict[str, Any]]) -> Iterator[str]:
    """What the same takes on links that are not shaped, and what is left for the wire."""
    yield (
        "Links that are not shaped cost CPU time only, of both hosts on the same CPUs; what a "
        "variant takes there, and its wire time, are what it would take if nothing overlapped "
        "(their sum) and if all did (the larger)."
    )
    yield ""
    yield "| case | variant | not shaped (s) | wire (s) | larger | sum | measured (s) |"
    yield "|---" * 7 + "|"
    free = {_kind(r["case"]): r["found"] for r in results if not r["case"]["rate"]}
    for result in results:
        case, twin = result["case"], free.get(_kind(result["case"]))
        if not case["rate"] or twin is None:
            continue
        for name in (name for name in result["found"] if name in twin):
            wire = result["found"][name]["counted"] * 8e-6 / case["rate"]
            alone = median(twin[name]["seconds"])
            cells = [f"{x:.3f}" for x in (alone, wire, max(alone, wire), alone + wire)]
            measured = median(result["found"][name]["seconds"])
            yield f"| {_title(case)} | {name} | {' | '.join(cells)} | {measured:.3f} |"


def _kind(case: dict[str, Any]) -> tuple:
    return case["name"], case["hosts"], case["devices"]
