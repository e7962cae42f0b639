"""What every test runs under: eight simulated CPU devices, checked annotations, fixed examples."""

import os

# JAX reads these when it is first imported, so they stand before every other import. Setting
# JAX_PLATFORMS outside is how the `accelerator` tests reach real hardware.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
_COUNT = "--xla_force_host_platform_device_count"
if _COUNT not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_COUNT}=8".strip()

import beartype
import hypothesis
import jaxtyping

# Every annotated function of the package checks its arguments and results, shapes included. As in
# Python's own typing rules, an int may stand where a float is asked for.
check_types = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))
jaxtyping.install_import_hook("moejax", f"{__name__}.check_types")

# No deadline, because a first call compiles; the same examples on every machine.
hypothesis.settings.register_profile("fixed", deadline=None, derandomize=True)
hypothesis.settings.load_profile("fixed")
