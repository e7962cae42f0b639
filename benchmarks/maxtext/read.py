"""Reads MaxText's compiled step with the reader of our own: moejax.aot.

What differs is in what MaxText's program says. Its operations name no scopes, so their classes come
from the functions that made them, which the program lists apart. And its ragged exchanges show
whole buffers, of which the rows that a balanced router sends are counted.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moejax.aot.compiled import CompiledCollective, CompiledText
from moejax.aot.step import CompiledStep
from moejax.aot.work import measure_work

# As `moejax.aot.work.CLASSES`, of MaxText's functions. The products that dispatch and combine rows
# in its dropping form are einsums of `dense_matmul` over masks, and count as "rest".
CLASSES = {
    "attention": r"^__cudnn\$fmha|\bsplash_m",
    "experts": r"^mosaic_gpu|\bt?gmm\b|/(wi_0|wi_1|wo)/",
    "projections": r"\b(query|kv|out|qkv)_projection\b",
    "logits": r"apply_output_head",
}


def name_functions(text: str) -> str:
    """Adds to the name of each operation the functions that made it, innermost first."""
    functions = {number: rest.strip('"') for number, rest in _table(text, "FunctionNames")}
    locations = {
        number: functions[_value("function_name_id", rest)]
        for number, rest in _table(text, "FileLocations")
    }
    frames = {
        number: (locations[_value("file_location_id", rest)], _value("parent_frame_id", rest) - 1)
        for number, rest in _table(text, "StackFrames")
    }

    def chain(frame: int) -> str:
        names = []
        while frame in frames:
            name, frame = frames[frame]
            names.append(name)
        return " < ".join(names)

    return re.sub(
        r'op_name="([^"]*)"([^}]*?stack_frame_id=(\d+))',
        lambda found: f'op_name="{found[1]} {chain(int(found[3]))}"{found[2]}',
        text,
    )


def read_step(
    text: str, facts: Mapping[str, Any], *, filled: float, row_bytes: int, model_flops: float
) -> CompiledStep:
    """Returns what a device executes and sends in a step.

    Args:
      text: of the compiled program.
      facts: what compile_step.py found besides.
      filled: share of the rows in the experts' buffers that a balanced router fills.
      row_bytes: of the rows that a device sends in an exchange when the router is balanced.
      model_flops: a device's share of the model's in a step.
    """
    compiled = CompiledText(name_functions(text), facts["mesh"])
    return CompiledStep(
        mesh=dict(facts["mesh"]),
        slow=("fsdp",),
        options={},
        seconds=facts["seconds"],
        argument_bytes=facts["argument_bytes"],
        temporary_bytes=facts["temporary_bytes"],
        peak_bytes=facts["peak_bytes"],
        exchanges=[_balanced(exchange, row_bytes) for exchange in compiled.exchanges()],
        schedules=compiled.schedules(),
        work=measure_work(compiled, filled=filled, classes=CLASSES),
        model_flops=model_flops,
    )


def _balanced(exchange: CompiledCollective, row_bytes: int) -> CompiledCollective:
    """A ragged exchange sends rows, not the buffer that it writes into."""
    if exchange.kind != "ragged_all_to_all":
        return exchange
    return replace(exchange, bytes=min(exchange.bytes, row_bytes))


def _table(text: str, name: str) -> list[tuple[int, str]]:
    """Number and rest of each line of a table at the program's head."""
    found = re.search(rf"^{name}\n(.*?)\n\n", text, re.DOTALL | re.MULTILINE)
    lines = found[1].splitlines() if found else []
    return [(int(number), rest) for number, rest in (line.split(" ", 1) for line in lines)]


def _value(name: str, text: str) -> int:
    found = re.search(rf"\b{name}=(\d+)", text)
    assert found is not None, (name, text)
    return int(found[1])
