"""Plan files: the chosen settings and their predicted cost."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moejax.config.fields import change, check_value, fields, has_removed, short
from moejax.config.schema import Config
from moejax.errors import InputError, write_whole
from moejax.plan.cluster.file import PLATFORMS, SIZE_LIMIT
from moejax.plan.cluster.topology import Topology
from moejax.plan.price.terms import to_json
from moejax.plan.search.search import SearchResult
from moejax.plan.search.space import SETTINGS, plan_of

VERSION = 1
KEYS = {"topology", "devices", "nodes", "routing", "settings", "predicted", "runner_up"}
LATER = {"cut", "platform", "device_memory_bytes", "order"}  # fields that older files lack


@dataclass(frozen=True)
class Plan:
    """A chosen plan.

    Attributes:
      topology: name of the cluster.
      routing: the routing as the user gave it.
      settings: values by dotted name.
      predicted: seconds of a step, its terms, bytes of a device, tokens a second.
      runner_up: the same for the second best plan; None if there was none.
      cut: one line about the time cap if it ended the search; None: another search finds the same.
      platform: platform of the cluster's devices; None in older files.
      device_memory_bytes: memory of one device; None in older files.
      order: names of the cluster's nodes in the order that the plan is for; None: as they are.
    """

    topology: str
    devices: int
    nodes: int
    routing: str
    settings: dict[str, Any]
    predicted: dict[str, Any]
    runner_up: dict[str, Any] | None = None
    cut: str | None = None
    platform: str | None = None
    device_memory_bytes: int | None = None
    order: list[str] | None = None

    def apply(self, cfg: Config) -> Config:
        """Returns the config with the plan's settings."""
        return change(cfg, self.settings | {"mesh.nodes": self.nodes})


def plan_from(result: SearchResult, topology: Topology, routing: str) -> Plan:
    """Returns the best plan of a search."""
    best, *others = result.ranked
    sites = result.sites.best if result.sites is not None else None
    order = sites.order if sites is not None and sites.plan is best else None
    return Plan(
        topology=topology.name,
        devices=topology.devices,
        nodes=topology.nodes,
        routing=routing,
        settings=plan_of(best.cfg),
        predicted=to_json(best),
        runner_up=to_json(others[0]) | {"settings": plan_of(others[0].cfg)} if others else None,
        cut=result.cut,
        platform=topology.device.platform,
        device_memory_bytes=topology.device.memory_bytes,
        order=None if order is None else list(map(topology.name_of, order)),
    )


def save_plan(plan: Plan, path: Path) -> None:
    """Writes a plan file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps({"version": VERSION, **vars(plan)}, indent=1) + "\n")


def load_plan(path: Path) -> Plan:
    """Reads a plan file.

    Raises:
      InputError: if it is no plan file, of another version, or has invalid settings.
    """
    try:
        if path.stat().st_size > SIZE_LIMIT:
            raise ValueError(f"{path.stat().st_size:,} bytes, no more than {SIZE_LIMIT:,} are read")
        data = json.loads(path.read_text(encoding="utf-8"))
    # Brackets nested thousands deep end json with RecursionError.
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"plan {path} cannot be read: {error}. It must be a file that moejax plan --out wrote. "
            "Check the path."
        ) from error
    version = data.pop("version", None) if isinstance(data, dict) else None
    if version != VERSION or set(data) - LATER != KEYS:
        raise InputError(
            f"plan {path} is not one. Its version is {version}, this moejax reads {VERSION}. "
            "Make it again with moejax plan --out."
        )
    _check_plan(path, data)
    return Plan(**data)


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _are_names(value: Any) -> bool:
    named = isinstance(value, list) and all(isinstance(name, str) for name in value)
    return value is None or named


COUNT, NAMES = "a whole number above 0", ", ".join(PLATFORMS)
# Field -> whether a value is right, and the rule in words.
FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "devices": (_is_count, COUNT),
    "nodes": (_is_count, COUNT),
    "topology": (lambda value: isinstance(value, str), "a text"),
    "routing": (lambda value: isinstance(value, str), "a text"),
    "cut": (lambda value: isinstance(value, str | None), "a text or null"),
    "platform": (lambda value: value in (None, *PLATFORMS), f"one of {NAMES}, or null"),
    "device_memory_bytes": (lambda value: value is None or _is_count(value), f"{COUNT}, or null"),
    "order": (_are_names, "names of nodes, or null"),
}


def _check_plan(path: Path, data: dict[str, Any]) -> None:
    """Checks a plan file's fields and gives settings their types."""
    for name, (holds, rule) in FIELDS.items():
        if not holds(data.get(name)):
            raise _damaged(path, name, data.get(name), rule)
    _check_settings(path, data["settings"])
    _check_seconds(path, "predicted", data["predicted"])
    if data["runner_up"] is not None:
        _check_seconds(path, "runner_up", data["runner_up"])
        settings = data["runner_up"].get("settings")
        if isinstance(settings, dict) and has_removed(settings):
            data["runner_up"] = None  # nothing can be compared with it
        else:
            _check_settings(path, settings)


def _check_seconds(path: Path, name: str, value: Any) -> None:
    seconds: Any = value.get("seconds") if isinstance(value, dict) else None
    if type(seconds) not in (int, float) or not 0 < seconds < math.inf:
        raise _damaged(path, f"{name}.seconds", seconds, "a time above 0")


def _check_settings(path: Path, settings: Any) -> None:
    if not isinstance(settings, dict):
        raise _damaged(path, "settings", settings, "names and values")
    known = fields()
    for name, value in settings.items():
        if name not in SETTINGS:
            raise InputError(
                f"plan {path} sets `{name}`, which no plan chooses. A plan may set "
                f"{', '.join(SETTINGS)}. Set `{name}` in the config, or make the plan again with "
                "moejax plan --out."
            )
        try:
            settings[name] = check_value(known[name], value)
        except InputError as error:
            raise InputError(f"plan {path}: {error}") from None


def _damaged(path: Path, name: str, value: Any, wanted: str) -> InputError:
    return InputError(
        f"plan {path} has {name} = {short(value)}. It must be {wanted}. Make the plan again with "
        "moejax plan --out."
    )
