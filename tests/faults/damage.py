"""Damage to the files of a checkpoint."""

import random
from pathlib import Path

KINDS = ("flip", "cut", "delete", "add", "copy of another")


def files_of(step: Path) -> list[Path]:
    """Returns the files of a checkpoint."""
    return sorted(path for path in step.rglob("*") if path.is_file())


def damage(step: Path, draw: random.Random) -> tuple[str, bool]:
    """Damages a file of a checkpoint. Returns what was done, and whether the file is as before."""
    files = files_of(step)
    path, kind = draw.choice(files), draw.choice(KINDS)
    content = path.read_bytes()
    if kind == "add":
        (path.parent / "more").write_bytes(content)
    elif kind == "copy of another":
        path.write_bytes(draw.choice(files).read_bytes())
    else:
        spoil(path, kind, draw)
    return f"{kind} {path.relative_to(step)}", path.is_file() and path.read_bytes() == content


def spoil(path: Path, kind: str, draw: random.Random) -> None:
    """Flips a bit of a file, cuts it, or deletes it; one without content is cut to nothing."""
    content = path.read_bytes()
    if kind == "delete":
        path.unlink()
    elif kind == "cut" or not content:
        path.write_bytes(content[: draw.randrange(len(content) or 1)])
    else:
        place = draw.randrange(len(content))
        flipped = bytes([content[place] ^ (1 << draw.randrange(8))])
        path.write_bytes(content[:place] + flipped + content[place + 1 :])
