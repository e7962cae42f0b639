"""The result of an evaluation, as tables and as JSON."""

import json
import math
import os
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from moejax.data.tokens import TokenSource
from moejax.evaluate.documents import DocumentScore
from moejax.train.evaluation import Score

SHOWN = 1000  # rows of the table of documents


@dataclass(frozen=True)
class Result:
    """The likelihood of held-out text under a checkpoint."""

    checkpoint: str
    step: int
    files: list[str]
    source: TokenSource
    score: Score
    documents: list[DocumentScore] | None = None  # if they were asked for

    @property
    def perplexity(self) -> float:
        """Exponential of nats per token; infinite where float64 ends."""
        try:
            return math.exp(self.score.nats_per_token)
        except OverflowError:
            return math.inf

    def to_json(self) -> str:
        """Returns the text that --json prints; numbers that are not finite are null."""
        totals = {
            "checkpoint": self.checkpoint,
            "step": self.step,
            "data": self.files,
            "tokens": self.score.targets,
            "bytes": self.source.target_bytes,
            "nats": self.score.nats,
            "nats_per_token": self.score.nats_per_token,
            "perplexity": self.perplexity,
            "bits_per_byte": self.score.bits_per_byte(self.source),
        }
        if self.documents is not None:
            totals["documents"] = [
                {
                    "document": document.name,
                    "tokens": document.tokens,
                    "bytes": document.bytes,
                    "nats": _finite(document.nats),
                    "bits_per_byte": _finite(document.bits_per_byte),
                }
                for document in self.documents
            ]
        finite = {name: _finite(value) for name, value in totals.items()}
        return json.dumps(finite, indent=1, allow_nan=False)


def print_tables(result: Result, console: Console) -> None:
    """Prints the totals, and the documents if there are some."""
    score, size = result.score, result.source.target_bytes
    bits = score.bits_per_byte(result.source)
    table = Table(title="held-out text", show_header=False, title_justify="left")
    table.add_row("checkpoint", f"{result.checkpoint} (step {result.step:,})")
    table.add_row("data", ", ".join(result.files))
    table.add_row("predicted tokens", f"{score.targets:,}")
    table.add_row("bytes of their text", "unknown" if size is None else f"{size:,}")
    if score.targets:
        table.add_row("nats per token", f"{score.nats_per_token:.4f}")
        table.add_row("perplexity", f"{result.perplexity:,.3f}")
        table.add_row("bits per byte", "unknown" if bits is None else f"{bits:.4f}")
    else:
        table.add_row("score", "none: no token of it is predicted (no targets)")
    if result.documents is not None:
        _print_documents(result.documents, console)
    console.print(table)


def _print_documents(documents: list[DocumentScore], console: Console) -> None:
    shown = [document.name for document in documents[:SHOWN]]
    folder = _folder(shown)
    title = f"documents in {folder}" if folder else "documents"
    table = Table(title=title, title_justify="left")
    table.add_column("document", overflow="fold")  # whole: names differ at their ends
    for name in ("tokens", "bytes", "nats", "bits per byte"):
        table.add_column(name, justify="right")
    for name, document in zip(shown, documents, strict=False):
        size, bits = document.bytes, document.bits_per_byte
        table.add_row(
            name.removeprefix(folder),
            f"{document.tokens:,}",
            "" if size is None else f"{size:,}",
            f"{document.nats:,.2f}",
            "" if bits is None else f"{bits:.4f}",
        )
    console.print(table)
    if len(documents) > SHOWN:
        console.print(f"and {len(documents) - SHOWN:,} more: --json has all of them")


def _folder(names: list[str]) -> str:
    """Returns the folder that names of documents share, with the slash behind it; "" for none."""
    # Letters, not parts of paths: a line, a row or a number may follow a path.
    folder, slash, _ = os.path.commonprefix(names).rpartition("/")  # noqa: RUF071
    return folder + slash


def _finite(value: Any) -> Any:
    """Returns None for a number that JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
