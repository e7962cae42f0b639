"""JAX settings that a run depends on, which it does not take from the environment.

A variable such as JAX_DEFAULT_PRNG_IMPL, set for another program, would give a run other weights,
and a run that goes on other noise than it began with.
"""

import sys

import jax

# Settings that numbers depend on. Checkpoints record them (docs/formats/checkpoint.md).
NUMBERS = {
    "jax_enable_x64": False,
    "jax_default_prng_impl": "threefry2x32",
    "jax_threefry_partitionable": True,
    "jax_random_seed_offset": 0,
    "jax_accurate_erf_inv": False,  # normal values are drawn by it
    "jax_high_dynamic_range_gumbel": False,
    "jax_softmax_custom_jvp": False,
    "jax_use_hlo_logistic_lowering": None,
    "jax_default_matmul_precision": None,
    "jax_disable_jit": False,
}
# Checks of how a program is written, which moejax and its libraries do not pass: values that end
# a program, and the one in their place. They change no number.
CHECKS = {
    "jax_numpy_rank_promotion": (("raise",), "allow"),
    "jax_numpy_dtype_promotion": (("strict",), "standard"),
    **{
        f"jax_transfer_guard{way}": (("disallow", "disallow_explicit"), "allow")
        for way in ("", "_host_to_device", "_device_to_device", "_device_to_host")
    },
}


def fix_settings() -> None:
    """Fixes the settings for this process, and lists on stderr the ones that it changed.

    Must run before the first array is made.
    """
    changed = []
    for name, value in NUMBERS.items():
        if getattr(jax.config, name, value) != value:  # older JAX lacks some
            changed.append((name, value))
    for name, (ends, value) in CHECKS.items():
        if getattr(jax.config, name) in ends:
            changed.append((name, value))
    for name, value in changed:
        jax.config.update(name, value)
    if changed:
        print(
            "moejax: a run has settings of JAX of its own, so these have no effect: "
            f"{', '.join(name.upper() for name, _ in changed)}",
            file=sys.stderr,
        )
