"""What a traced program says about its collectives; shared by all who read or rewrite one."""

from collections.abc import Sequence
from typing import Any

# JAX's primitives, and the kinds of `comm.wire`.
KINDS = {
    "psum": "all_reduce",
    "psum_invariant": "all_reduce",
    "pmax": "all_max",
    "pmin": "all_min",
    "ppermute": "permute",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
}

# Calls: what they hold is part of the program around them.
CALLS = (
    "pjit",
    "jit",
    "closed_call",
    "core_call",
    "checkpoint",
    "remat2",
    "custom_jvp_call",
    "custom_vjp_call",
    "shard_map",
)


def inner_jaxprs(eqn: Any) -> list[Any]:
    """The jaxprs in an equation's parameters, closed or open: loops, branches, calls."""
    found = []
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(opened(item), "eqns"):
                found.append(item)
    return found


def opened(jaxpr: Any) -> Any:
    """The open jaxpr of a closed one; anything else as it is."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def communicates(jaxpr: Any) -> bool:
    """Whether a jaxpr issues a collective, however deep inside."""
    return any(
        eqn.primitive.name in KINDS or any(map(communicates, inner_jaxprs(eqn)))
        for eqn in opened(jaxpr).eqns
    )


def scan_operands(params: Any, given: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """What a scan is given, as (the same in every turn, carried, one slice a turn)."""
    if "ft_in" in params:  # since JAX 0.12
        kept, carry, scanned = map(list, params["ft_in"].update(list(given)).unpack())
        return kept, carry, scanned
    first = params["num_consts"]
    second = first + params["num_carry"]
    return list(given[:first]), list(given[first:second]), list(given[second:])
