"""The trainer's XLA options beyond the defaults, by platform.

Only options that improved the compiled step are set: docs/decisions/0006 has the figures for GPUs
and TPUs, and options that were tried without gain; docs/log.md (2026-11-24) has the figures for
CPUs. The names hold on JAX 0.10.2 and 0.12.0.1, for GPUs and TPUs on 0.11.2 too.
"""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax.errors import JaxRuntimeError
from jax.sharding import SingleDeviceSharding

Options = dict[str, str | int]


def compiler_options(
    platform: str, *, hops: int, reduction_hops: int = 1, stages: int = 1, ring: bool = False
) -> Options:
    """Returns the options of a run's programs.

    Args:
      platform: "cpu", "gpu" or "tpu".
      hops: number of hops of the route.
      reduction_hops: number of collectives, one after the other, that sum a dense gradient.
      stages: number of pipeline stages.
      ring: whether keys travel along a ring (`model.ring`).
    """
    if platform == "gpu":
        # By default one collective runs at a time, so half of the exchanges stay exposed. The
        # pipeline has two collectives in flight per hop (dispatch and combine); one more slot is
        # for weights and their gradients. XLA runs the reductions of a layer in the next turn of
        # the loop, behind attention. There the first of three in a row finds the slots taken by
        # the experts' reductions, and is waited for; hence a second slot (docs/log.md, 2026-11-25).
        slots = 2 * hops + max(1, reduction_hops - 1)
        # Transfers between stages are under way beside a whole loop over layers, and such a loop
        # starts only if slots are left for all its own collectives (docs/log.md, 2026-11-26).
        slots += stages > 1
        # Where nothing is exchanged, a gather beside a reduction: with one slot products hide a
        # third of the gathers' bytes, with two 65 % (docs/log.md, 2026-11-28).
        slots = max(2, slots)
        # A ring sends keys and sums of gradients, each by a chain and the way around; with three
        # slots one of the four is waited for (docs/log.md, 2026-11-29).
        slots = max(4, slots) if ring else slots
        return {"xla_gpu_experimental_parallel_collective_overlap_limit": slots}
    if platform == "tpu":
        # By default every collective is synchronous. SparseCores, where a TPU has them, gather
        # weights and reduce their gradients while the TensorCore multiplies.
        names = ["collective_offload_all_gather", "collective_offload_reduce_scatter"]
        names = [f"sparse_core_{name}" for name in names] + ["async_all_to_all"] * (hops > 0)
        return {f"xla_tpu_enable_{name}": "true" for name in names}
    if platform == "cpu":
        # By default nothing orders the reads of the old moments, for the new parameters, before the
        # new moments are written in place, so XLA copies all moments in each step. With it, as by
        # default on other platforms, it orders them.
        return {"xla_cpu_copy_insertion_use_region_analysis": "True"}
    return {}


def known_options(options: Options, device: Any) -> Options:
    """Returns the options that a device's compiler knows, and warns about the others.

    XLA refuses to compile with an unknown option, and any release may remove options. A run
    without one is slower but correct. Costs one trivial compilation per option.
    """
    return {name: value for name, value in options.items() if _knows(name, value, device)}


def _knows(name: str, value: str | int, device: Any) -> bool:
    scalar = jax.ShapeDtypeStruct((), jnp.int32, sharding=SingleDeviceSharding(device))
    try:
        jax.jit(lambda x: x, compiler_options={name: value}).lower(scalar).compile()
    except JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        message = f"this JAX ({jax.__version__}) has no compiler option {name}: goes on without it"
        warnings.warn(message, stacklevel=2)
        return False
    return True
