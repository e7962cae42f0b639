"""Flags of the commands that continue texts, and the start that they share."""

import argparse

from rich.console import Console

from moejax.errors import InputError
from moejax.evaluate.checkpoint import FORWARD, Chosen, choose, read_weights
from moejax.runtime.processes import Processes
from moejax.serve.experts.places import STEPS, Places
from moejax.serve.placing import check_expert_slots, check_overrides, place, place_weights
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


def add_expert_slots(command: argparse.ArgumentParser) -> None:
    """Adds the flags of `Engine(expert_slots=, follow_load=)`."""
    add = command.add_argument
    slots = "room for R more experts on each of their devices"
    add("--expert-slots", type=int, default=0, metavar="R", help=slots)
    follow = "move hot experts there meanwhile; texts stay the same"
    add("--follow-load", action="store_true", help=follow)


def check_slot_flags(args: argparse.Namespace) -> None:
    """Checks these flags.

    Raises:
      InputError: if they are out of range, or one has no effect without the other.
    """
    if args.expert_slots < 0:
        raise InputError(
            f"`--expert-slots` is out of range. Got {args.expert_slots}. It is at least 0. "
            f"Change it."
        )
    if args.follow_load and not args.expert_slots:
        raise InputError(
            "`--follow-load` has no effect without `--expert-slots`. Hot experts go to slots. Add "
            "--expert-slots 1, or leave it out."
        )
    if args.expert_slots and not args.follow_load:
        raise InputError(
            "`--expert-slots` has no effect without `--follow-load`. Slots would stay empty. Add "
            "--follow-load, or leave it out."
        )


def add_settings(command: argparse.ArgumentParser) -> None:
    """Adds the flags that every command ends with."""
    add = command.add_argument
    add("--config.FIELD", metavar="VALUE", dest="_", help="override a setting of the run")
    add("--debug", action="store_true", help="show tracebacks of bad input")


def choose_model(args: argparse.Namespace, overrides: list[str], processes: Processes) -> Chosen:
    """Returns the checkpoint that the flags name, before a device is touched.

    Raises:
      InputError: if there is none, or a setting or a flag does not fit it.
    """
    check_overrides(overrides)
    chosen = choose(args.run, args.step, overrides, processes, FORWARD)
    if args.expert_slots and not chosen.cfg.model.has_experts:
        raise InputError(
            f"`--expert-slots` has no effect. Got {args.expert_slots}. The model has no experts. "
            f"Leave it out."
        )
    check_expert_slots(chosen.cfg, args.expert_slots)
    check_simulated_devices(chosen.cfg)
    check_same_config(chosen.cfg, processes)
    return chosen


def load_model(
    chosen: Chosen, processes: Processes, console: Console, **form: int
) -> tuple[Programs, TrainState, Places | None]:
    """Starts the devices. Returns the compiled functions, weights, and places with slots for them.

    Experts are at home, and programs that move them are compiled.

    Args:
      console: is told where weights lie, if there are several devices.
      form: slots, positions, allowed ids and slots for experts, as of `build_programs`.
    Raises:
      InputError: if devices have no room for the weights and the cache, or one owns all experts.
    """
    placed, named = place(chosen, processes), chosen.names_mesh
    placed, programs = place_weights(placed, processes, named=named, **form)
    if placed.mesh.size > 1:
        axes = ", ".join(f"{axis} {size}" for axis, size in placed.mesh.shape.items() if size > 1)
        gathers = "no call gathers" if placed.gathered else "each call gathers"
        console.print(f"mesh: {axes}; {gathers} weights", highlight=False)
    places = Places(programs, processes) if programs.expert_slots else None
    beside = programs.bytes_beside_weights()
    check_memory(programs.train_step, processes, gradients=False, beside=beside)
    state = programs.take(read_weights(chosen, programs.stored, processes), processes)
    if places is not None:
        console.print(
            f"experts: slots on each device: {programs.expert_slots}; hot ones move there, a "
            f"layer's at most every {STEPS} steps",
            highlight=False,
            soft_wrap=True,
        )
        state = places.compile_moves(places.at_home(state))
    return programs, state, places
