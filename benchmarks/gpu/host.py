"""A train step that keeps moments or residuals in the host's memory, beside one that does not.

The planner says what each takes by rates that `moejax plan probe` measured here, copies between
host and device among them. Memory is the allocator's peak: forms run alone for it, the smallest
first, because a peak cannot be set back. Times are taken in turns. Last, a state in the host's
memory is saved while the next step runs, and read back.
"""

import tempfile
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.gpu.case import Case, Reporter
from benchmarks.gpu.layers import CONFIG, SMALL, noise, one_device_step
from benchmarks.gpu.predicted import probe
from benchmarks.gpu.targets import Rates
from benchmarks.gpu.timing import Form, measure, run_once
from moejax.checkpoint.find import newest
from moejax.checkpoint.writer import Checkpoints, arrays_of, restore_state
from moejax.config.load import load_config
from moejax.plan.cluster.topology import Topology
from moejax.plan.price.candidate import PricedPlan, price, trace_step
from moejax.plan.price.routing import read_expert_load
from moejax.step.train_step import TrainStep

# Two micro-batches, so that two states fit beside what a step takes.
BOTH = ("model.remat=attention", "train.micro_batches=2")
MEMORY, SAVE = "memory of a step", "save while the next step runs"
FORMS = {
    "residuals": (*BOTH, "memory.residuals=host"),
    "optimizer": (*BOTH, "memory.optimizer=host"),
    "device": BOTH,
}


@cache
def topology() -> Topology:
    """What a quick probe measures here, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        return probe(Path(folder), quick=True)


@cache
def train_step(settings: tuple[str, ...], *, small: bool) -> TrainStep:
    """The trainer on one device."""
    cfg = load_config(CONFIG, [*(SMALL if small else ()), *settings])
    return one_device_step(cfg, jax.devices())


@cache
def priced(settings: tuple[str, ...], *, small: bool) -> PricedPlan:
    """The planner's time and memory of a step."""
    step = train_step(settings, small=small)
    load = read_expert_load("balanced", step.cfg.moe.num_experts)
    return price(trace_step(step), topology(), load)


@cache
def compiled(settings: tuple[str, ...], *, small: bool) -> Any:
    """The compiled step."""
    step = train_step(settings, small=small)
    return step.step.lower(step.abstract, step.abstract_batch()).compile()


def step_form(settings: tuple[str, ...], *, small: bool) -> Form:
    """Steps of a run from its first state on."""
    step, run = train_step(settings, small=small), compiled(settings, small=small)
    batch, states = noise(step), [step.init()]

    def start() -> jax.Array:
        states[0], metrics = run(states[0], batch)
        return metrics.loss

    return Form(start, lambda _: jax.block_until_ready(states[0]))


def peak_bytes() -> int | None:
    """The most that the allocator has given so far; None where it does not say."""
    stats = jax.local_devices()[0].memory_stats()
    return stats.get("peak_bytes_in_use") if stats else None


def measure_memory(report: Reporter) -> None:
    """Runs each form alone, and writes down its memory beside the planner's."""

    def take_of(name: str) -> int:
        return priced(FORMS[name], small=report.small).steps.bytes

    before = 0
    names = report.attempt(MEMORY, "planner", lambda: sorted(FORMS, key=take_of))
    for name in names or ():

        def run(settings: tuple[str, ...] = FORMS[name]) -> dict[str, Any]:
            form = step_form(settings, small=report.small)
            for _ in range(2):
                run_once(form)
            plan = priced(settings, small=report.small)
            memory = compiled(settings, small=report.small).memory_analysis()
            return {
                "predicted_bytes": plan.steps.bytes,
                "predicted_host_bytes": plan.host_bytes,
                "compiler_bytes": memory.peak_memory_in_bytes if memory else None,
            }

        found = report.attempt(MEMORY, name, run)
        if found is not None:
            peak = peak_bytes()
            grown = peak is not None and peak > before
            before = peak or 0
            report.row(MEMORY, name, **found, peak_bytes=peak if grown else None)


def compare_places(report: Reporter, name: str) -> None:
    """Times steps with something in the host's memory and without, in turns."""
    forms, chosen = {}, {"host": FORMS[name], "device": FORMS["device"]}
    for place, settings in chosen.items():

        def prepare(settings: tuple[str, ...] = settings) -> Form:
            form = step_form(settings, small=report.small)
            run_once(form)
            return form

        form = report.attempt(Rates.PLACES, place, prepare)
        if form is not None:
            forms[place] = form
    rounds = 2 if report.small else 5
    timed = report.attempt(
        Rates.PLACES, "timing", lambda: measure(forms, rounds=rounds, burst_s=0.0)
    )
    for place, seconds in (timed or {}).items():
        predicted = priced(chosen[place], small=report.small).seconds
        report.row(Rates.PLACES, place, seconds=seconds, predicted=predicted)


def save_beside_step(report: Reporter) -> None:
    """Saves moments that lie on the host while the next step runs, and reads them back."""

    def run() -> int:
        # A small model on a GPU too: what is asked is whether bits stay.
        step = train_step(FORMS["optimizer"], small=True)
        state, run_step = step.init(), compiled(FORMS["optimizer"], small=True)
        state, _ = run_step(state, noise(step))
        wanted = {key: np.array(x) for key, x in arrays_of(state).items()}
        with tempfile.TemporaryDirectory() as folder:
            saves = Checkpoints(Path(folder), keep=2)
            saves.save(1, state, {})
            state, _ = run_step(state, noise(step))
            jax.block_until_ready(state)
            saves.close()
            saved, _ = newest(Path(folder), "full")
            assert saved is not None
            found = arrays_of(restore_state(saved, step.abstract))
        differ = [key for key, x in wanted.items() if not np.array_equal(found[key], x)]
        if differ:
            raise RuntimeError(f"{', '.join(differ)} are not what was saved")
        return len(wanted)

    arrays = report.attempt(SAVE, "moejax", run)
    if arrays is not None:
        report.row(SAVE, "moejax", arrays=arrays)


def host_cases(*, small: bool) -> list[Case]:
    """Memory first, while no peak is above it."""
    return [
        Case("alone", measure_memory),
        *(Case(name, partial(compare_places, name=name)) for name in FORMS if name != "device"),
        Case("moments on the host", save_beside_step),
    ]
