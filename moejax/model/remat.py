"""Remat policies of a repeat of blocks, and the order in which backward reduces gradients."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from moejax.comm import wire
from moejax.comm.host import MEMORY_KIND
from moejax.comm.weights.shard import attach, detach, without
from moejax.kernels.attention.attention import keep_attended
from moejax.kernels.kept import ATTENDED, GATE_AND_UP, INVERSES, PLACES
from moejax.layout.spec import StepSpec


def _keep(*names: str) -> Callable:
    """Returns the policy that keeps named values, and places of rows."""
    named = jax.checkpoint_policies.save_only_these_names(PLACES, *names)
    if ATTENDED not in names:
        return named
    return jax.checkpoint_policies.save_from_both_policies(named, keep_attended)


REMAT_POLICIES: dict[str, Callable | None] = {
    "full": None,
    "dots": jax.checkpoint_policies.dots_saveable,
    "collectives": _keep(wire.TOKEN_WIRE, wire.WEIGHT_WIRE),
    "token_collectives": _keep(wire.TOKEN_WIRE),
    "attention": _keep(wire.TOKEN_WIRE, ATTENDED, INVERSES),
    "experts": _keep(wire.TOKEN_WIRE, ATTENDED, INVERSES, GATE_AND_UP),
}


def remat_policy(remat: str, spec: StepSpec) -> Callable | None:
    """Returns the remat policy of a repeat, for `model.remat` and the gathers of weights."""
    policy = REMAT_POLICIES[remat]
    if policy and spec.residuals_on_host:
        policy = _on_host(policy)
    if spec.gather_across != "passes":
        return policy
    kept = jax.checkpoint_policies.save_only_these_names(wire.NODE_WIRE)
    return _either(policy, kept) if policy else kept


def _either(first: Callable, second: Callable) -> Callable:
    """Returns the policy that keeps what either keeps, where the first says."""

    def policy(primitive: Any, *where: Any, **params: Any) -> Any:
        return first(primitive, *where, **params) or second(primitive, *where, **params)

    return policy


def _on_host(policy: Callable) -> Callable:
    """Returns the policy that keeps the same values in the host's memory, but for places."""

    def kept(primitive: Any, *where: Any, **params: Any) -> Any:
        if not policy(primitive, *where, **params):
            return False
        return params.get("name") == PLACES or _host()

    return kept


@functools.cache
def _host() -> Any:
    """Returns what policies return for a value that goes to the host.

    JAX makes it for named values alone, and results of attention on GPUs have no name.
    """
    named = jax.make_jaxpr(lambda x: checkpoint_name(x, ATTENDED))(0.0).eqns[0]
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[ATTENDED],
        offload_src="device",
        offload_dst=MEMORY_KIND,
    )
    return policy(named.primitive, name=ATTENDED)


def in_turn(repeat: Callable, x_BtD: jax.Array, scanned: tuple[jax.Array, Any]) -> Any:
    """Runs an unrolled repeat; its gradients are complete in backward before the next begins.

    A loop does so by itself. Without this, XLA reduces the gradients of all layers at the end,
    where no computation is left to hide the reductions.
    """
    layer, state = scanned
    fields = detach(state)
    # Frozen and gathered weights have no gradient, which the tie would make zeros of their size.
    if not jax.tree.leaves(fields.adapter):
        x_BtD, state = _tie_gradients(x_BtD, without(state, "gathered"))
        state = attach(state, gathered=fields.gathered)
    return repeat(x_BtD, (layer, state))


@jax.custom_vjp
def _tie_gradients(x_BtD: jax.Array, state: Any) -> Any:
    return x_BtD, state


def _tie_forward(x_BtD, state):
    return (x_BtD, state), None


def _tie_backward(_, gradients):
    return jax.lax.optimization_barrier(gradients)


_tie_gradients.defvjp(_tie_forward, _tie_backward)
