"""Finds collectives in jaxprs; for the modules that read or rewrite traced programs."""

from collections.abc import Sequence
from typing import Any

# JAX's primitive -> the collective of `comm.wire`.
KINDS = {
    "psum": "all_reduce",
    "psum_invariant": "all_reduce",
    "pmax": "all_max",
    "pmin": "all_min",
    "ppermute": "ppermute",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
}

# Calls: the jaxpr inside belongs to the program around it.
CALLS = (
    "pjit",
    "jit",
    "closed_call",
    "eval_jaxpr",  # the name of closed_call from JAX 0.12 on
    "core_call",
    "checkpoint",
    "remat2",
    "custom_jvp_call",
    "custom_vjp_call",
    "shard_map",
)


def is_beside(eqn: Any) -> bool:
    """Returns whether a program on CPU waits for a collective only where it uses the result.

    Those are transfers between stages, and gathers of `wire.gather_beside`.
    """
    name = eqn.primitive.name
    return name == "ppermute" or (name == "all_gather" and not eqn.params["tiled"])


def inner_jaxprs(eqn: Any) -> list[Any]:
    """The jaxprs in an equation's parameters, closed or open: of loops, branches and calls."""
    values = (v if isinstance(v, (tuple, list)) else (v,) for v in eqn.params.values())
    return [item for items in values for item in items if hasattr(opened(item), "eqns")]


def opened(jaxpr: Any) -> Any:
    """Returns the open jaxpr inside a closed jaxpr; returns anything else as it is."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def communicates(jaxpr: Any) -> bool:
    """Returns whether a jaxpr issues a collective, at any depth."""
    return any(
        eqn.primitive.name in KINDS or any(map(communicates, inner_jaxprs(eqn)))
        for eqn in opened(jaxpr).eqns
    )


def scan_operands(params: Any, operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Splits the operands of a scan into (constants, carry, arrays scanned over)."""
    if "ft_in" in params:  # since JAX 0.12
        consts, carry, scanned = map(list, params["ft_in"].update(list(operands)).unpack())
        return consts, carry, scanned
    start = params["num_consts"]
    stop = start + params["num_carry"]
    return list(operands[:start]), list(operands[start:stop]), list(operands[stop:])
