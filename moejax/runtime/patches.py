"""Private parts of other libraries that moejax replaces or reads: each in one function.

Private kernels are called where they are wrapped: `kernels.attention.tokamax` and `.splash`.

All hold for JAX 0.10 to 0.12 and Orbax 0.12. When a version is added, look at each again: its
docstring says what must be public there for it to go.
"""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from jax._src import compilation_cache, compiler, distributed, xla_bridge
from jax.extend import backend
from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]


def coordination_client() -> Any:
    """Returns the client of JAX's coordination service; None outside a program of processes.

    Goes when `jax.distributed` hands it out. No issue filed.
    """
    return distributed.global_state.client


def make_cpu_client_with(address: Callable[[], str]) -> None:
    """Has JAX make a CPU client whose gloo listens at an address, in place of the host name's.

    That name may have no address, or one that leads back to the host itself. Goes when an option of
    JAX says where gloo listens. No issue filed.
    """

    def make() -> Any:
        client = coordination_client()
        if client is None:  # this process was one of several, and has left them
            return xla_bridge.make_cpu_client()
        gloo = _jax.make_gloo_tcp_collectives(distributed_client=client, hostname=address())
        return xla_bridge.make_cpu_client(gloo)

    xla_bridge.register_backend_factory("cpu", make, fail_quietly=False)


def keep_programs_by(write: Callable[..., None]) -> None:
    """Has every process keep compiled programs in its cache, by `write` in place of JAX's function.

    JAX keeps them in process 0 alone, but hosts have caches of their own. Goes when an option says
    which processes write. No issue filed.
    """
    compiler._cache_write = write


def keep_program(key: str, name: str, executable: Any, backend: Any, seconds: float) -> None:
    """Writes a compiled program to JAX's cache; for `keep_programs_by`, and goes with it."""
    compilation_cache.put_executable_and_time(key, name, executable, backend, int(seconds))


@dataclass(frozen=True)
class DescribedHopper:
    """A described H200, in place of the default device for which tokamax writes its kernels."""

    platform: str = "gpu"
    device_kind: str = "NVIDIA H200"
    compute_capability: str = "9.0"
    core_count: int = 132


@contextlib.contextmanager
def described_gpu(device: Any = DescribedHopper()) -> Iterator[None]:
    """Lets JAX and tokamax trace and lower attention for the described GPU where none is.

    They ask the installed cuDNN for its version and the local GPU for its capability, not the
    target; this goes when they ask the target. No issue filed. `kernels.select` has checked what
    the target takes.

    Args:
      device: the described GPU.
    """
    import jax._src.cudnn.fused_attention_stablehlo as fused_attention

    answers: list[tuple[Any, str, Callable[..., Any]]] = [
        (fused_attention, "check_cudnn_version", lambda: 91000),  # 9.10.0, as in aot/target.py
        # Heads above 128 channels need 9.0.
        (fused_attention, "check_compute_capability", lambda capability: True),
    ]
    if importlib.util.find_spec("tokamax") is not None:
        answers.append((backend, "get_default_device", lambda: device))
    with contextlib.ExitStack() as stack:
        for module, name, answer in answers:
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, answer)
        yield


def let_orbax_begin_again(agree: Callable[[int], list[int]]) -> None:
    """Lets Orbax save in a second program of processes.

    It keeps the client of the first, and all processes must have counted the same saves: one that
    has just started has counted fewer. Goes when Orbax asks JAX for its client at each save.
    No issue filed.

    Args:
      agree: takes the number of saves of this process, and returns the numbers of all processes.
    """
    from orbax.checkpoint._src.futures import signaling_client, synchronization

    signaling_client.get_signaling_client.cache_clear()
    counter = synchronization.OperationIdGenerator
    most = max(agree(int(counter.get_current_operation_id())))
    while int(counter.get_current_operation_id()) < most:
        counter.next_operation_id()
