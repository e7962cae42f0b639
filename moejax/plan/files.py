"""Plan files: the settings that a search chose, with what they were predicted to cost."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moejax.config import Config
from moejax.errors import InputError, write_whole
from moejax.fields import check_value, fields
from moejax.plan.explain import to_json
from moejax.plan.search import Found
from moejax.plan.space import change, plan_of
from moejax.plan.topology import Topology

VERSION = 1
KEYS = {"topology", "devices", "nodes", "routing", "settings", "predicted", "runner_up"}


@dataclass(frozen=True)
class Plan:
    """A chosen plan.

    Attributes:
      topology: name of the cluster it was made for.
      routing: as it was asked for.
      settings: by dotted name.
      predicted: seconds of a step, its terms, bytes of a device, tokens a second.
      runner_up: the same of the next best; None if there was none.
    """

    topology: str
    devices: int
    nodes: int
    routing: str
    settings: dict[str, Any]
    predicted: dict[str, Any]
    runner_up: dict[str, Any] | None = None

    def apply(self, cfg: Config) -> Config:
        """The config with the plan's settings."""
        return change(cfg, self.settings | {"mesh.nodes": self.nodes})


def plan_from(found: Found, topology: Topology, routing: str) -> Plan:
    """The best plan of a search."""
    best, *others = found.ranked
    return Plan(
        topology=topology.name,
        devices=topology.devices,
        nodes=topology.nodes,
        routing=routing,
        settings=plan_of(best.cfg),
        predicted=to_json(best),
        runner_up=to_json(others[0]) | {"settings": plan_of(others[0].cfg)} if others else None,
    )


def save_plan(plan: Plan, path: Path) -> None:
    """Writes a plan file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps({"version": VERSION, **vars(plan)}, indent=1) + "\n")


def load_plan(path: Path) -> Plan:
    """Reads a plan file.

    Raises:
      InputError: it is none, of another version, or has settings that do not exist or are wrong.
    """
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(
            f"plan {path} cannot be read: {error}. It must be a file that moejax plan --out wrote. "
            "Check the path."
        ) from error
    version = found.pop("version", None) if isinstance(found, dict) else None
    if version != VERSION or set(found) != KEYS:
        raise InputError(
            f"plan {path} is not one. Its version is {version}, this moejax reads {VERSION}. "
            "Make it again with moejax plan --out."
        )
    known = fields()
    for name, value in found["settings"].items():
        if name not in known:
            raise InputError(f"plan {path} sets `{name}`, which is no setting. Make it again.")
        found["settings"][name] = check_value(known[name], value)
    return Plan(**found)
