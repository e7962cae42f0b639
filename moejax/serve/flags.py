"""Flags of the commands that continue texts, and the start that they share."""

import argparse

from rich.console import Console

from moejax.evaluate.checkpoint import FORWARD, Chosen, choose, read_weights
from moejax.runtime.processes import Processes
from moejax.serve.placing import check_overrides, place, place_weights
from moejax.serve.programs import Programs
from moejax.step.state import TrainState
from moejax.train.records.summary import check_memory
from moejax.train.start import check_same_config, check_simulated_devices


def add_checkpoint(command: argparse.ArgumentParser) -> None:
    """Adds the flags that name a checkpoint."""
    add = command.add_argument
    add("--run", metavar="DIR", required=True, help="a run directory, or an imported checkpoint")
    add("--step", type=int, metavar="N", help="its checkpoint of step N (default: the newest)")


def add_tokenizer(command: argparse.ArgumentParser) -> None:
    """Adds the flags that name a tokenizer and its chat template."""
    add = command.add_argument
    add("--tokenizer", metavar="FILE", help="a tokenizer.json (default: the model's)")
    add("--eos", metavar="NAME", help="token (or id) that ends a text; with --tokenizer")
    add("--chat-template", metavar="FILE", help="a Jinja template (default: the model's)")


def add_settings(command: argparse.ArgumentParser) -> None:
    """Adds the flags that every command ends with."""
    add = command.add_argument
    add("--config.FIELD", metavar="VALUE", dest="_", help="override a setting of the run")
    add("--debug", action="store_true", help="show tracebacks of bad input")


def choose_model(args: argparse.Namespace, overrides: list[str], processes: Processes) -> Chosen:
    """Returns the checkpoint that the flags name, before a device is touched.

    Raises:
      InputError: if there is none, or a setting does not fit it.
    """
    check_overrides(overrides)
    chosen = choose(args.run, args.step, overrides, processes, FORWARD)
    check_simulated_devices(chosen.cfg)
    check_same_config(chosen.cfg, processes)
    return chosen


def load_model(
    chosen: Chosen, processes: Processes, console: Console, **form: int
) -> tuple[Programs, TrainState]:
    """Starts the devices. Returns the compiled functions and the weights of a checkpoint.

    Args:
      console: is told where weights lie, if there are several devices.
      form: slots, positions and allowed ids, as of `build_programs`.
    Raises:
      InputError: if devices have no room for the weights and the cache.
    """
    placed, named = place(chosen, processes), chosen.names_mesh
    placed, programs = place_weights(placed, processes, named=named, **form)
    if placed.mesh.size > 1:
        axes = ", ".join(f"{axis} {size}" for axis, size in placed.mesh.shape.items() if size > 1)
        gathers = "no call gathers" if placed.gathered else "each call gathers"
        console.print(f"mesh: {axes}; {gathers} weights", highlight=False)
    beside = programs.bytes_beside_weights()
    check_memory(programs.train_step, processes, gradients=False, beside=beside)
    return programs, programs.take(read_weights(chosen, programs.stored, processes), processes)
