"""Runs Mosaic kernels on a CPU, and fails where one reads what may not be there yet."""

import contextlib

# No public name leads to the races that were found.
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu as plgpu


@contextlib.contextmanager
def interpreted():
    """Kernels traced inside run in the interpreter, on one device."""
    params = plgpu.InterpretGPUParams(detect_races=True)
    try:
        with plgpu.force_gpu_interpret_mode(params):
            yield
        assert not interpret_pallas_call.get_races().races_found
    finally:
        # What an exception leaves behind would fail the tests that come after.
        interpret_pallas_call.reset_gpu_interpret_mode_state()
