"""What every test runs under: eight simulated CPU devices, checked annotations, fixed examples."""

import os

# JAX reads these when it is first imported, so they stand before every other import. Setting
# JAX_PLATFORMS outside is how the `accelerator` tests reach real hardware.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# What tests compile is run once, so they ask LLVM for little: four times faster to compile. Workers
# already fill the cores, so a program is not cut for several threads.
_FLAGS = {
    "--xla_force_host_platform_device_count": "8",
    "--xla_backend_optimization_level": "0",
    "--xla_cpu_parallel_codegen_split_count": "1",
}
_given = os.environ.get("XLA_FLAGS", "")
_added = [f"{flag}={value}" for flag, value in _FLAGS.items() if flag not in _given]
os.environ["XLA_FLAGS"] = " ".join([_given, *_added]).strip()

from pathlib import Path

import beartype
import hypothesis
import jaxtyping
import pytest

# Every annotated function of the package checks its arguments and results, shapes included. As in
# Python's own typing rules, an int may stand where a float is asked for.
check_types = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))
jaxtyping.install_import_hook("moejax", f"{__name__}.check_types")

# No deadline, because a first call compiles; the same examples on every machine.
hypothesis.settings.register_profile("fixed", deadline=None, derandomize=True)
hypothesis.settings.load_profile("fixed")

# Of 65,530 mappings of memory that Linux allows a process, each compiled program takes some; a
# compiler that gets no more ends the process.
MANY_MAPPINGS = 25_000


@pytest.fixture(autouse=True, scope="module")
def programs_are_let_go():
    """Forgets compiled programs between files when there are very many."""
    yield
    mappings = Path("/proc/self/maps")
    if mappings.exists() and len(mappings.read_bytes().splitlines()) > MANY_MAPPINGS:
        import jax

        jax.clear_caches()
