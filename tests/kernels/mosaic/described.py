"""Compiles kernels for a described H200 and reads what the compiler says of them."""

import functools
import re
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.aot.target import TARGETS, describe_devices

SHARED_BYTES = 227 * 1024  # that a thread block can have on Hopper
# Blocks of a multiprocessor share 65,536 registers and 228 KiB, and the system keeps 1 KiB of each.
REGISTERS, MULTIPROCESSOR_BYTES = 65_536, 228 * 1024


@dataclass(frozen=True)
class Compiled:
    """One kernel: its resources, and how often its PTX has what it should be made of."""

    name: str
    registers: int  # of a thread
    spilled_bytes: int
    shared_bytes: int
    threads: int
    wgmma: int
    wgmma_e4m3: int  # of them, those whose operands are both e4m3
    serialized: bool  # whether ptxas makes each product wait for the one before
    bulk_loads: int
    bulk_stores: int

    @property
    def blocks(self) -> int:
        """Thread blocks that a multiprocessor runs at a time."""
        by_registers = REGISTERS // (self.threads * (-(-self.registers // 8) * 8))
        return min(by_registers, MULTIPROCESSOR_BYTES // (self.shared_bytes + 1024))


@functools.cache
def described_mesh() -> Mesh:
    """One H200."""
    return Mesh(np.array(describe_devices(TARGETS["h200"], 1)[:1]), ("device",))


def compile_kernels(function, *shapes, monkeypatch, directory: Path) -> list[Compiled]:
    """Compiles a function of arrays of those (shape, dtype). Returns its kernels, in order."""
    for name in ("PTX", "PTXAS"):
        monkeypatch.setenv(f"MOSAIC_GPU_DUMP_{name}", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(directory))
    mesh = described_mesh()
    whole = NamedSharding(mesh, P())
    arrays = [jax.ShapeDtypeStruct(shape, dtype, sharding=whole) for shape, dtype in shapes]
    with jax.set_mesh(mesh):
        jax.jit(function).lower(*arrays).compile()
    return [_read(path) for path in sorted(directory.glob("*.ptxas"), key=_order)]


def _order(path: Path) -> int:
    return int(path.stem.rpartition("_")[2])


def _read(path: Path) -> Compiled:
    # Messages of ptxas may hold zero bytes.
    said = path.read_text(errors="replace")
    ptx = path.with_suffix(".ptx").read_text(errors="replace")
    (name,) = re.findall(r"entry function '(\w+)_mosaic_gpu_kernel'", said)
    # A kernel that is there twice is numbered twice; what it launches with is written once.
    launch = [one.read_text() for one in path.parent.glob(f"{name}_*.before_layout_inference.txt")]
    return Compiled(
        name=name,
        registers=int(re.findall(r"Used (\d+) registers", said)[0]),
        spilled_bytes=sum(int(size) for size in re.findall(r"(\d+) bytes spill stores", said)),
        shared_bytes=_most(r"dynamic_shared_memory_size %c(\d+)_i32", launch),
        threads=_most(r"threads\([^)]*\) in \(%\w+ = %c(\d+)", launch),
        wgmma=len(re.findall(r"wgmma\.mma_async\.sync", ptx)),
        wgmma_e4m3=len(re.findall(r"wgmma\.mma_async\.sync[\w.]*\.f32\.e4m3\.e4m3", ptx)),
        serialized="serialized" in said,
        bulk_loads=len(re.findall(r"cp\.async\.bulk\.[\w.]*shared::\w+\.global", ptx)),
        bulk_stores=len(re.findall(r"cp\.async\.bulk\.[\w.]*global\.shared::cta", ptx)),
    )


def _most(pattern: str, texts: list[str]) -> int:
    return max(int(number) for text in texts for number in re.findall(pattern, text))
