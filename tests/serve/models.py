"""Small models with weights for the tests of generation."""

import dataclasses

import jax
import numpy as np

from moejax.config.schema import Config, LoraConfig, MeshConfig
from moejax.serve.programs import Programs, build_programs
from tests.cases import step_for


def weights_of(state):
    """A state of weights alone."""
    return state._replace(optimizer=(), reduction=None)


def random_state(cfg: Config):
    """Weights on one device, NumPy arrays, none of which is zero as biases are at first."""
    alone = dataclasses.replace(cfg, mesh=MeshConfig())
    state = weights_of(step_for(dataclasses.replace(alone, lora=LoraConfig())).init())
    if cfg.lora.rank is not None:
        first = step_for(alone).first_state(state.params, state.router_bias)
        state = weights_of(first)._replace(frozen=jax.tree.map(np.asarray, state.params))
    draw = np.random.default_rng(0)

    def moved(x):
        return np.asarray(x) + 0.05 * draw.standard_normal(x.shape).astype(np.float32)

    bias = jax.tree.map(np.asarray, state.router_bias)
    return state._replace(params=jax.tree.map(moved, state.params), router_bias=bias)


def on_mesh(state, programs_or_step):
    """A state on the devices of programs or of a step of weights."""
    programs = programs_or_step if isinstance(programs_or_step, Programs) else None
    abstract = (programs.stored if programs else programs_or_step.of_weights()).abstract
    state = jax.tree.map(
        lambda x, a: jax.device_put(np.asarray(x, a.dtype), a.sharding), state, abstract
    )
    return programs.take(state) if programs else state


def programs_for(cfg: Config, slots: int, positions: int) -> Programs:
    """The programs on the first devices that the mesh asks for."""
    mesh, allowed = step_for(cfg).mesh, cfg.model.vocab_size
    return build_programs(cfg, mesh, "cpu", slots=slots, positions=positions, allowed=allowed)
