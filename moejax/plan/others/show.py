"""Prints a translation: a command line, its reasons, its gaps, its assumptions."""

from collections.abc import Callable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moejax.config.schema import Config
from moejax.errors import InputError
from moejax.plan.cluster.topology import Topology
from moejax.plan.others.maxtext import to_maxtext
from moejax.plan.others.megatron import to_megatron
from moejax.plan.others.torchtitan import to_torchtitan
from moejax.plan.others.translation import SHAPE, Translation
from moejax.plan.price.routing import ExpertLoad
from moejax.plan.search.search import SearchResult

TRAINERS: dict[str, Callable[[Config, Topology], Translation]] = {
    "maxtext": lambda cfg, cluster: to_maxtext(cfg, cluster.device.platform),
    "megatron": lambda cfg, cluster: to_megatron(cfg, cluster.sizes[0]),
    "torchtitan": lambda cfg, cluster: to_torchtitan(cfg),
}
SOURCE_LETTERS = 200  # of the text about a cluster's rates; its file has all of it
NVIDIA_ONLY = ("megatron", "torchtitan")


def check_trainer(name: str, cfg: Config, topology: Topology) -> None:
    """Refuses a trainer of `TRAINERS` that cannot run a plan of this config on this cluster.

    Raises:
      InputError: for a cluster without GPUs, or a config without counterpart there.
    """
    if name in NVIDIA_ONLY and topology.device.platform != "gpu":
        raise InputError(
            f"--as is {name}, but the devices of {topology.name} are "
            f"{topology.device.platform}s. {name} trains on GPUs. Choose another --topology, or "
            "--as maxtext."
        )
    if cfg.lora.rank is not None:
        raise InputError(
            f"--as is {name}, but `lora.rank` is {cfg.lora.rank}. Only plans that train all "
            "weights have a counterpart there. Leave lora.rank out."
        )


def print_translation(
    translation: Translation,
    result: SearchResult,
    topology: Topology,
    load: ExpertLoad,
    console: Console,
) -> None:
    """Shows the command, the reason for each setting, the gaps, and the assumptions."""

    def say(text: str = "") -> None:
        console.print(text, highlight=False, soft_wrap=True)

    say(f"\nthe best plan as settings of {translation.trainer} ({translation.package}):\n")
    say(translation.command())
    say(f"\nadd what no plan decides: {translation.yours}\n")
    table = Table(title=f"settings of {translation.trainer}", title_justify="left")
    table.add_column("setting", no_wrap=True)
    table.add_column("part of the plan", overflow="fold")
    for option in translation.options:
        if option.because != SHAPE:
            table.add_row(Text(translation.written(option)), Text(option.because))
    console.print(table)
    lost = [f"{gap.what}: it {gap.instead}" for gap in translation.gaps]
    say(f"what {translation.trainer} cannot express of this plan:")
    for line in lost or ["nothing that the planner chose"]:
        say(f"  - {line}")
    say("what the prediction assumes:")
    for line in assumptions(translation, result, topology, load):
        say(f"  - {line}")


def assumptions(
    translation: Translation, result: SearchResult, topology: Topology, load: ExpertLoad
) -> list[str]:
    """Returns the assumptions behind predicted time and memory, one sentence each."""
    best, name = result.ranked[0], translation.trainer
    cfg = best.cfg
    factor = cfg.moe.capacity_factor
    drops = "no token is dropped" if factor is None else f"capacity factor {factor:g}: tokens drop"
    source = topology.source
    if len(source) > SOURCE_LETTERS:
        source = f"{source[:SOURCE_LETTERS].rstrip()} ..."
    lines = [
        f"{best.seconds * 1e3:,.2f} ms and {best.peak.bytes / 2**30:.2f} GiB a device are of "
        f"moejax's own step; {name} runs another program, whose time and memory are not predicted",
        f"links and devices of {topology.name}, {topology.devices} on {topology.nodes} nodes: "
        f"{source}",
    ]
    if cfg.model.has_experts:
        lines.append(
            f"routing {load.name}: the busiest expert has {load.skew:.2f} x the mean; {drops}"
        )
    lines += [
        f"{cfg.train.batch_sequences} sequences of {cfg.data.sequence_length} tokens a step, "
        f"compute in {cfg.model.dtype}, optimizer {cfg.optimizer.name}",
        "moejax's schedule of exchanges, gathers and reductions beside compute, and no other load "
        "on the links",
    ]
    return lines
