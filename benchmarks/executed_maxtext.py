"""What does a device execute in MaxText's step of OLMoE-1B-7B, beside ours?

Compiles MaxText 0.2.5's own train step for the clusters of benchmarks.executed and
benchmarks.executed_tpu, and reads it with the same reader; our rows are taken from their pages.
Needs an environment of MaxText's (benchmarks/maxtext/requirements.txt) in .venv-maxtext, and no
accelerator. Nothing runs. Writes executed_maxtext.json and executed_maxtext.md.

    .venv/bin/python -m benchmarks.executed_maxtext --out benchmarks/results
"""

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.aot import write_cases
from benchmarks.executed import shares, tables
from benchmarks.machine import RESULTS, ROOT
from benchmarks.maxtext.read import read_step
from moejax.aot.command import to_json
from moejax.aot.target import H200, TARGETS

PYTHON = ".venv-maxtext/bin/python"
EXPERT = 8  # devices that share out the experts
# OLMoE-1B-7B in MaxText's words, 1024 sequences of 4096 tokens in 32 micro-batches. MaxText has no
# OLMoE; Qwen3's block norms queries and keys a head at a time, where OLMoE's norms all heads.
MODEL = [
    "decoder_block=qwen3_moe",
    "base_emb_dim=2048",
    "base_num_query_heads=16",
    "base_num_kv_heads=16",
    "head_dim=128",
    "base_num_decoder_layers=16",
    "base_mlp_dim=1024",
    "base_moe_mlp_dim=1024",
    "num_experts=64",
    "num_experts_per_tok=8",
    "vocab_size=50304",
    "use_qk_norm=true",
    "norm_topk_prob=false",
    "enable_dropout=false",
    "max_target_length=4096",
    "normalization_layer_epsilon=1e-5",
    "load_balance_loss_weight=0.01",
    "gradient_accumulation_steps=32",
    "per_device_batch_size=2",
    "ici_fsdp_parallelism=2",
    "ici_expert_parallelism=8",
    "dataset_type=synthetic",
    "packing=false",
    "scan_layers=true",
    "opt_type=adamw",
    "weight_dtype=float32",
    "dtype=bfloat16",
    "enable_checkpointing=false",
    "run_name=compiled",
]
# What a device sends in an exchange of a balanced micro-batch: 2 sequences, 8 experts a token.
ROWS = 2 * 4096 * 8
ROW_BYTES = ROWS * 2048 * 2
PLATFORM = {
    "gpu": ["hardware=gpu", "attention=cudnn_flash_jax", "megablox=false"],
    "tpu": ["hardware=tpu", "attention=flash", "megablox=true", "allow_split_physical_axes=true"],
}
TOKAMAX = ["sparse_matmul=true", "use_tokamax_gmm=true"]
MEGABLOX = ["sparse_matmul=true"]
FULL, MINIMAL = "remat_policy=full", "remat_policy=minimal_with_context"
BUFFER = "ragged_buffer_factor=1.25"
# Target, nodes, MaxText's settings.
CASES = (
    ("h200", 2, [*TOKAMAX, BUFFER, FULL]),
    ("h200", 2, [*TOKAMAX, BUFFER, MINIMAL]),
    ("h200", 2, [*TOKAMAX, FULL]),
    ("h200", 2, ["sparse_matmul=false", "capacity_factor=1.25", FULL]),
    ("v5p_16", 2, [*MEGABLOX, BUFFER, FULL]),
    ("v5p_16", 2, [*MEGABLOX, FULL]),
    ("v6e_16", 2, [*MEGABLOX, BUFFER, FULL]),
)
NAMES = {"h200": "2 x 8 H200", "v5p_16": "v5p 2x2x4", "v6e_16": "v6e 4x4"}


def compile_case(target: str, nodes: int, settings: list[str]) -> dict[str, Any]:
    """Compiles in MaxText's environment, and reads the program in ours."""
    with tempfile.TemporaryDirectory() as folder:
        kind = TARGETS[target]
        request = {
            "platform": kind.platform,
            "topology": kind.topology or f"1x{nodes}x8",
            "target_config": H200,
            "settings": [*MODEL, *PLATFORM[kind.platform], *settings],
            "out": folder,
        }
        command = [PYTHON, "benchmarks/maxtext/compile_step.py"]
        subprocess.run(command, cwd=ROOT, input=json.dumps(request), text=True, check=True)
        return read_case(target, nodes, settings, Path(folder))


def read_case(target: str, nodes: int, settings: list[str], folder: Path) -> dict[str, Any]:
    """Reads what compile_step.py wrote into a folder."""
    facts = json.loads((folder / "step.json").read_text())
    text = (folder / "step.txt").read_text()
    flops = ours()[0]["model_flops"]
    step = read_step(text, facts, filled=_filled(settings), row_bytes=ROW_BYTES, model_flops=flops)
    found = to_json(step) | {"cpu_seconds": facts["cpu_seconds"], "maxtext_jax": facts["jax"]}
    return {"target": target, "nodes": nodes, "settings": settings} | found


def _filled(settings: list[str]) -> float:
    """Share of the rows of the experts' buffers that a balanced router fills.

    Without a factor, MaxText's buffers hold every row that could arrive.
    """
    values = dict(setting.split("=", 1) for setting in settings)
    return 1 / float(values.get("ragged_buffer_factor", EXPERT))


def ours() -> list[dict[str, Any]]:
    """Our rows of the same model and clusters, from their pages."""
    gpu = json.loads((RESULTS / "executed.json").read_text())["cases"]
    found = [
        case | {"target": "h200"}
        for case in gpu
        if case["config"] == "olmoe_1b_7b" and case["nodes"] == 2
    ]
    return found + json.loads((RESULTS / "executed_tpu.json").read_text())["cases"]


def name_of(case: dict[str, Any]) -> str:
    """Names a case by whose it is, its cluster and its settings."""
    whose = "MaxText" if "maxtext_jax" in case else "ours"
    settings = ", ".join(f"`{one}`" for one in case["settings"])
    return f"{whose}, {NAMES[case['target']]}: {settings}"


def to_markdown(result: dict[str, Any]) -> str:
    """The page."""
    lines = [
        "# What a device executes in MaxText's step of OLMoE-1B-7B, beside ours",
        "",
        "`.venv/bin/python -m benchmarks.executed_maxtext`",
        "",
        "MaxText 0.2.5's own train step (`benchmarks/maxtext`), compiled for the clusters of",
        "[executed.md](executed.md) and [executed_tpu.md](executed_tpu.md), whose rows are ours,",
        "and read by the same reader: columns are explained there. The same JAX and compilers, the",
        "same mesh fsdp=2 x expert=8, 1024 sequences of 4096 tokens in 32 micro-batches, float32",
        "weights and AdamW. Of ragged exchanges the rows of a balanced router are counted.",
        "",
        "Not equal: MaxText's buffers with a factor may drop rows, where ours send what overflows",
        "in further rounds; without a factor they hold every row that could arrive. It reduces",
        "gradients in bfloat16, ours in float32. On GPUs its attention looks across documents,",
        "ours does not. It norms queries and keys a head at a time. It has no z-loss here. Its",
        "dropping form dispatches by products of masks, which are the rest.",
        "",
        *beside(result["cases"]),
        "## All columns",
        "",
        *tables([*ours(), *result["cases"]], name_of),
        "",
        *shares([*ours(), *result["cases"]], name_of),
    ]
    lines += ["", f"Machine: {json.dumps(result['machine'])}, JAX {result['jax']}"]
    return "\n".join(lines) + "\n"


# Ours and MaxText's that are compared: target, and what the settings of each have; ours fewest.
PAIRS = (
    ("h200", ["model.remat=full"], [BUFFER, FULL]),
    ("h200", ["model.remat=experts", "mesh.gather_dense=step"], [BUFFER, MINIMAL]),
    ("h200", ["mesh.gather_dense=step", "model.scan_layers=false"], [BUFFER, MINIMAL]),
    ("h200", ["model.remat=full"], ["use_tokamax_gmm=true", FULL]),
    ("h200", ["model.remat=full"], ["capacity_factor=1.25", FULL]),
    ("v5p_16", [], [BUFFER, FULL]),
    ("v5p_16", [], [*MEGABLOX, FULL]),
    ("v6e_16", [], [BUFFER, FULL]),
)
COLUMNS = {
    "FLOPs": ("{:.2f}", lambda case: case["executed"]["all"]),
    "launches": ("{:,}", lambda case: case["work"]["launches"]),
    "loops": ("{:,}", lambda case: case["work"]["loops"]),
    "conditionals": ("{:,}", lambda case: case["work"]["conditionals"]),
    "traffic, TB": ("{:.2f}", lambda case: case["work"]["other_bytes"] / 1e12),
    "memory, GiB": (
        "{:.1f}",
        lambda case: (case["argument_bytes"] + case["temporary_bytes"]) / 2**30,
    ),
    "sent, GB": ("{:.0f}", lambda case: _sent(case)),
    "sent behind no product, GB": ("{:.0f}", lambda case: _sent(case) * (1 - case["hidden_wire"])),
}


def _sent(case: dict[str, Any]) -> float:
    return sum(row["bytes"] for row in case["wire"]) / 1e9


def beside(cases: list[dict[str, Any]]) -> list[str]:
    """The lines that set one of ours beside one of MaxText's, column by column."""
    lines = [
        "## Ours beside MaxText's",
        "",
        "Ours / MaxText's, less is better in each column; **bold** where ours is behind. Ours",
        "drops nothing in any row.",
        "",
        "| pair | " + " | ".join(COLUMNS) + " |",
        "|---|" + "---|" * len(COLUMNS),
    ]
    for target, own, other in PAIRS:
        left = next((case for case in ours() if _fits(case, target, own)), None)
        right = next((case for case in cases if _fits(case, target, other)), None)
        if left is None or right is None:
            continue
        cells = []
        for form, value in COLUMNS.values():
            texts = [form.format(value(case)) for case in (left, right)]
            behind = value(left) > value(right) and texts[0] != texts[1]
            cells.append(f"**{texts[0]} / {texts[1]}**" if behind else f"{texts[0]} / {texts[1]}")
        names = name_of(left), ", ".join(f"`{one}`" for one in right["settings"])
        lines.append(f"| {names[0]}; MaxText: {names[1]} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def _fits(case: dict[str, Any], target: str, words: list[str]) -> bool:
    """Whether a case has the settings, and no buffer factor that they do not name."""
    extra = BUFFER in case["settings"] and BUFFER not in words
    return case["target"] == target and set(words) <= set(case["settings"]) and not extra


if __name__ == "__main__":
    write_cases("executed_maxtext", CASES, to_markdown, __doc__ or "", compile_case)
