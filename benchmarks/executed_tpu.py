"""What does a device execute in a step of OLMoE on slices of sixteen TPU v5p and v6e?

The same as benchmarks.executed, for described TPUs. Needs moejax[tpu] and no TPU; nothing runs, and
each case compiles for minutes. Writes executed_tpu.json and executed_tpu.md.

    .venv-aot-tpu/bin/python -m benchmarks.executed_tpu --out benchmarks/results
"""

import json
from typing import Any

from benchmarks.aot import write_cases
from benchmarks.executed import TWO_NODES, tables
from moejax.aot.command import to_json
from moejax.aot.step import build_described, compile_step, described_config
from moejax.aot.target import TARGETS
from moejax.config.load import load_config

CONFIG = "configs/olmoe_1b_7b.py"
NAMES = {"v5p_16": "v5p, 2x2x4", "v6e_16": "v6e, 4x4"}


def compile_case(target: str, nodes: int, settings: list[str]) -> dict[str, Any]:
    """Compiles the step alone: each program takes minutes."""
    words = [f"--config.{setting}" for setting in settings]
    cfg = described_config(load_config(CONFIG, words), TARGETS[target], nodes)
    step = to_json(compile_step(build_described(cfg, TARGETS[target])))
    return {"target": target, "nodes": nodes, "settings": settings} | step


def to_markdown(result: dict[str, Any]) -> str:
    """The page."""
    lines = [
        "# What a device executes in a step: OLMoE-1B-7B on slices of sixteen TPUs",
        "",
        "`.venv-aot-tpu/bin/python -m benchmarks.executed_tpu`",
        "",
        "The step of [executed.md](executed.md), on the same mesh, fsdp=2 x expert=8, with",
        "`route_chunks=4`. Attention is JAX's splash kernel, experts are megablox. FLOPs",
        "of attention are those of the blocks that the kernels visit, those of experts count no",
        "tile of rows twice that two groups share. Launches: what cores start, with copies into",
        "their own memory. Traffic: what crosses the border of the device's memory; values that",
        "stay in a core's own are not counted. Nothing ran, so nothing is timed.",
        "",
        *tables(result["cases"], lambda case: NAMES[case["target"]]),
        "",
        f"Machine: {json.dumps(result['machine'])}, JAX {result['jax']}",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    cases = [(target, 2, TWO_NODES) for target in NAMES]
    write_cases("executed_tpu", cases, to_markdown, __doc__ or "", compile_case)
