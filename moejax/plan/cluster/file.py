"""Reads, checks and writes topology files, and lists the clusters that come with moejax.

Format: docs/formats/topology.md. Files may be written by hand. A rate given in bits
instead of bytes would silently give a wrong plan, so every field is checked.
"""

import dataclasses
import difflib
import functools
import itertools
import json
import math
from pathlib import Path
from typing import Any

from moejax.config.fields import one_line, short
from moejax.errors import InputError, write_whole
from moejax.plan.cluster.device import Device
from moejax.plan.cluster.json_object import JsonObject
from moejax.plan.cluster.topology import KINDS, Host, Link, Tier, Topology, same_links

VERSION = 1
SIZE_LIMIT = 16 << 20
CLUSTERS = Path(__file__).parent / "known"
PLATFORMS = ("cpu", "gpu", "tpu")
FASTEST = 4e12  # bytes a second; no link of a device comes near
# No cluster is slower: whoever writes less forgot an exponent. Bytes a second of a link, of memory,
# FLOP/s of a product, and bytes of a device.
SLOWEST, SLOWEST_COPY, SLOWEST_PRODUCT, SMALLEST = 1e4, 1e6, 1e6, 2**20
FAR_OFF = 4.0  # times the known rate of the same device; bits for bytes would be 8 times
ASYMMETRY = 1.25
LATEST = 60.0  # seconds of a smallest message; more counts milliseconds
# Attribute -> its key in the file, where they differ.
KEYS = {
    "contention": "together",
    "compute_share": "occupies",
    "sync_delay_s": "late_s",
    "program_overhead": "program",
    "oversubscription": "sharing",
}
VALUES = ("exponentials_per_s", "reductions_per_s")
# Values of a device's optional fields that are left out of a file.
MISSING = {"copies": ()} | dict.fromkeys(VALUES, math.inf)


def load_topology(name: str) -> Topology:
    """Returns a known cluster (`dgx_h100`, or `dgx_h100:4` for four nodes), or reads a file.

    Raises:
      InputError: if no cluster or file has this name, or the file is not valid.
    """
    word, colon, count = name.partition(":")
    if word in known_clusters():
        topology = read_topology(CLUSTERS / f"{word}.json")
        if not colon:
            return topology
        try:
            if not count.isascii() or not count.isdigit() or len(count) > 9:
                raise ValueError(f"`{short(count)[1:-1]}` is not a number of nodes.")
            return topology.of_nodes(int(count))
        except ValueError as error:
            raise InputError(
                f"no such cluster. `{short(name)[1:-1]}`: {error} The number after the colon is "
                f"the number of nodes. Write, for example, {topology.name}:{topology.nodes}."
            ) from error
    if Path(name).is_file():
        return read_topology(Path(name))
    known = ", ".join(known_clusters())
    close = difflib.get_close_matches(word, known_clusters(), 1)
    hint = f"Did you mean {close[0]}? " if close else ""
    raise InputError(
        f"no topology. `{short(name)[1:-1]}` is neither a file nor a known cluster. It must be a "
        f"path that moejax plan probe wrote, or one of {known}, with :NODES behind. {hint}Correct "
        f"it."
    )


@functools.cache
def known_clusters() -> tuple[str, ...]:
    """Names of the clusters that come with moejax."""
    return tuple(sorted(path.stem for path in CLUSTERS.glob("*.json")))


def read_topology(path: Path) -> Topology:
    """Reads and checks a file.

    Raises:
      InputError: if it is missing, damaged, of another version, or has impossible values.
    """
    if not path.is_file():
        raise InputError(
            f"no topology. {path} does not exist. It must be a file that moejax plan probe wrote. "
            f"Probe the cluster, or correct the path."
        )
    if path.stat().st_size > SIZE_LIMIT:
        raise InputError(
            f"topology is too large. {path} has {path.stat().st_size} bytes. The limit is "
            f"{SIZE_LIMIT}. Probe the cluster again."
        )
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    # Brackets nested thousands deep end json with RecursionError.
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"topology is damaged. {path}: {one_line(str(error))}. It must be JSON. Correct it, "
            f"or probe the cluster again."
        ) from error
    return from_json(facts, str(path))


def write_topology(topology: Topology, path: Path) -> None:
    """Writes a topology file; `read_topology` reads it back unchanged."""
    write_whole(path, to_text(topology))


def to_text(topology: Topology) -> str:
    """Returns a topology as JSON text, each list of numbers on one line."""
    facts = dataclasses.asdict(
        topology, dict_factory=lambda fields: {KEYS.get(name, name): v for name, v in fields}
    )
    for tier in facts["tiers"]:
        links = list(tier["links"].values())
        if all(link == links[0] for link in links):
            tier["links"] = {"all": links[0]}
    for name in ("pairs", "pair_startup_s", "node_names", "asymmetric", "host"):
        if not facts[name]:
            del facts[name]
    for name, missing in MISSING.items():
        if facts["device"][name] == missing:
            del facts["device"][name]
    return _laid_out(facts, "\n") + "\n"


def _laid_out(value: Any, newline: str) -> str:
    """Formats JSON, one entry a line, indented as `newline` is; plain lists stay on one line."""
    nested = isinstance(value, list | tuple) and any(
        isinstance(v, list | tuple | dict) for v in value
    )
    if not value or not (nested or isinstance(value, dict)):
        return json.dumps(value)
    deeper = newline + " "
    if isinstance(value, dict):
        entries = [f"{json.dumps(name)}: {_laid_out(v, deeper)}" for name, v in value.items()]
        return "{" + deeper + f",{deeper}".join(entries) + newline + "}"
    entries = [_laid_out(v, deeper) for v in value]
    return "[" + deeper + f",{deeper}".join(entries) + newline + "]"


def from_json(facts: Any, file: str) -> Topology:
    """Builds a topology from a file's JSON.

    Raises:
      InputError: for the first invalid field.
    """
    part = JsonObject(facts, "", file)
    version = part.facts.get("version")
    if type(version) is int and version > VERSION:
        part.refuse("topology of a newer moejax", version, f"up to {VERSION}", "Upgrade moejax")
    part.keys(Topology, KEYS)
    if version != VERSION or type(version) is not int:
        part.refuse("`version` is unknown", version, str(VERSION), "Probe the cluster again")
    topology = Topology(
        version=VERSION,
        name=part.text("name"),
        source=part.text("source"),
        device=_device(part.inner("device")),
        tiers=tuple(_tier(inner) for inner in part.items("tiers")),
        host=_host(part.inner("host")) if "host" in part.facts else None,
        **part.given(
            pairs=part.matrix,
            pair_startup_s=part.matrix,
            node_names=part.texts,
            asymmetric=part.flag,
        ),
    )
    _check_tiers(part, topology)
    _check_pairs(part, topology)
    _check_known(part, topology)
    return topology


def _device(part: JsonObject) -> Device:
    part.keys(Device, KEYS, ignored=("codecs",))  # rates that files had once
    products = part.inner("products")
    curves = {dtype: products.curve(dtype) for dtype in products.facts}
    for dtype, curve in curves.items():
        _check_sizes(products, one_line(dtype[:80]), curve)
        fastest = max(rate for _, rate in curve)
        _check_unit(products, one_line(dtype[:80]), fastest, SLOWEST_PRODUCT, "FLOP/s")
    if not curves:
        part.refuse("`device.products` is empty", {}, "rates of at least one dtype", "Add float32")
    copies = part.curve("copies") if "copies" in part.facts else ()
    if "copies" in part.facts:
        _check_sizes(part, "copies", copies)
    for name in ("copy_bytes_per_s", "gather_bytes_per_s"):
        _check_unit(part, name, part.rate(name), SLOWEST_COPY, "bytes a second")
    _check_unit(part, "memory_bytes", part.count("memory_bytes"), SMALLEST, "bytes")
    return Device(
        name=part.text("name"),
        platform=part.value("platform", "one of " + ", ".join(PLATFORMS), PLATFORMS.__contains__),
        memory_bytes=part.count("memory_bytes"),
        products=curves,
        copy_bytes_per_s=part.rate("copy_bytes_per_s"),
        gather_bytes_per_s=part.rate("gather_bytes_per_s"),
        startup_s=part.share("startup_s", 1),
        copies=copies,
        **part.given(**dict.fromkeys(VALUES, part.rate)),
        program_overhead=part.rate("program") if "program" in part.facts else 1.0,
        oversubscription=part.rate("sharing") if "sharing" in part.facts else 1.0,
    )


def _check_unit(part: JsonObject, field: str, value: float, least: float, unit: str) -> None:
    """Checks that a number is not so low that its exponent was forgotten."""
    if value < least:
        where, rule = f"`{part.at(field)}` is too low", f"at least {least:g}, in {unit}"
        part.refuse(where, value, rule, "Write all of it: 12.5 GB/s is 12.5e9")


def _check_sizes(part: JsonObject, field: str, curve: tuple[tuple[Any, float], ...]) -> None:
    sizes = [size for size, _ in curve]
    if not sizes or sizes != sorted(set(sizes)):
        where = f"`{part.at(field)}` is wrong"
        part.refuse(where, sizes, "sizes that grow, at least one", "Sort them")


def _tier(part: JsonObject) -> Tier:
    part.keys(Tier, KEYS)
    listed = part.inner("links")
    if "all" in listed.facts:
        listed.known(["all"], ["all"])
        links_of = same_links(_link(listed.inner("all")))
    else:
        listed.known(list(KINDS), list(KINDS))
        links_of = {kind: _link(listed.inner(kind)) for kind in KINDS}
    return Tier(
        name=part.text("name"),
        size=part.count("size"),
        links=links_of,
        contention=part.share("together", 2) if "together" in part.facts else 1.0,
        compute_share=part.share("occupies", 1) if "occupies" in part.facts else 0.0,
        sync_delay_s=part.share("late_s", 60) if "late_s" in part.facts else 0.0,
    )


def _host(part: JsonObject) -> Host:
    part.keys(Host, KEYS)
    _check_unit(part, "memory_bytes", part.count("memory_bytes"), SMALLEST, "bytes")
    rates = (_link_rate(part, name) for name in ("to_device", "from_device"))
    return Host(*rates, memory_bytes=part.count("memory_bytes"))


def _link_rate(part: JsonObject, field: str) -> float:
    """Returns the bytes a second of a link."""
    rate = part.rate(field)
    if rate > FASTEST:
        where, rule = f"`{part.at(field)}` is too fast", f"below {FASTEST:g} bytes a second"
        part.refuse(where, rate, rule, "Divide by 8 if it is in bits")
    _check_unit(part, field, rate, SLOWEST, "bytes a second")
    return rate


def _link(part: JsonObject) -> Link:
    part.keys(Link, KEYS)
    return Link(
        startup_s=part.share("startup_s", 60),
        bytes_per_s=_link_rate(part, "bytes_per_s"),
        **part.given(error=lambda name: part.share(name, 1e6), points=part.curve, bends=part.curve),
    )


def _check_tiers(part: JsonObject, topology: Topology) -> None:
    for index, (fast, slow) in enumerate(zip(topology.tiers, topology.tiers[1:], strict=False)):
        if all(fast.links[kind].bytes_per_s < slow.links[kind].bytes_per_s for kind in KINDS):
            rates = [tier.links["all_to_all"].bytes_per_s for tier in (fast, slow)]
            where = f"`tiers[{index}]` ({fast.name}) is slower than `tiers[{index + 1}]`"
            part.refuse(where, rates, "the fastest tier first", "Swap them, or join them to one")


def _check_pairs(part: JsonObject, topology: Topology) -> None:
    """Checks that matrices cover all nodes and are alike in both directions."""
    names, nodes = topology.node_names, topology.nodes
    if names and len(names) != nodes:
        part.refuse("`node_names` is wrong", list(names), f"{nodes} names", "Probe again")
    for field, matrix in (("pairs", topology.pairs), ("pair_startup_s", topology.pair_startup_s)):
        if matrix:
            _check_matrix(part, field, matrix, nodes)
    for row in topology.pair_startup_s:
        if max(row) > LATEST:
            where, rule = "`pair_startup_s` is too long", f"up to {LATEST:g} s of a small message"
            part.refuse(where, max(row), rule, "Give seconds: 50 ms are 0.05")
    pairs = topology.pairs
    for a, b in itertools.permutations(range(len(pairs)), 2):
        if pairs[a][b] > FASTEST:
            where, rule = f"`pairs[{a}][{b}]` is too fast", f"below {FASTEST:g} bytes a second"
            part.refuse(where, pairs[a][b], rule, "Divide by 8 if it is in bits")
        if pairs[a][b] > ASYMMETRY * pairs[b][a] and not topology.asymmetric:
            part.refuse(
                f"`pairs` differ by direction: {a} to {b}, and {b} to {a}",
                [pairs[a][b], pairs[b][a]],
                f"alike within {ASYMMETRY - 1:.0%}: links carry both directions",
                "Repair the link and probe again, or set `asymmetric` to true if it is so",
            )


def _check_matrix(
    part: JsonObject, field: str, matrix: tuple[tuple[float, ...], ...], nodes: int
) -> None:
    """Checks that a matrix has a number above 0 for each two nodes, and 0 on its diagonal."""
    if len(matrix) != nodes or any(len(row) != nodes for row in matrix):
        sizes = [len(row) for row in matrix]
        part.refuse(f"`{field}` is not whole", sizes, f"{nodes} rows of {nodes}", "Probe again")
    for a, b in itertools.product(range(nodes), repeat=2):
        if (matrix[a][b] > 0) == (a == b):
            rule = "0" if a == b else "above 0: every pair is measured"
            part.refuse(f"`{field}[{a}][{b}]` is wrong", matrix[a][b], rule, "Probe again")


def _check_known(part: JsonObject, topology: Topology) -> None:
    """Checks that no link is far faster than the known links of the same device."""
    if Path(part.file).parent == CLUSTERS:
        return
    bounds = _known_rates().get(topology.device.name.lower(), ())
    for index, (tier, bound) in enumerate(zip(topology.tiers, bounds, strict=False)):
        for kind in KINDS:
            rate = tier.links[kind].bytes_per_s
            if rate > FAR_OFF * bound:
                part.refuse(
                    f"`tiers[{index}].links.{kind}.bytes_per_s` is too fast",
                    rate,
                    f"about {bound:.3g} bytes a second of a {topology.device.name}",
                    "Divide by 8 if it is in bits",
                )


@functools.cache
def _known_rates() -> dict[str, tuple[float, ...]]:
    """Returns device name -> the fastest link of each tier among the known clusters."""
    fastest: dict[str, tuple[float, ...]] = {}
    for name in known_clusters():
        topology = read_topology(CLUSTERS / f"{name}.json")
        rates = [max(link.bytes_per_s for link in t.links.values()) for t in topology.tiers]
        device = topology.device.name.lower()
        both = itertools.zip_longest(rates, fastest.get(device, ()), fillvalue=0.0)
        fastest[device] = tuple(map(max, both))
    return fastest
