"""The manifest of a checkpoint: its step, config, and the size and digest of every file.

The manifest has a digest of its own, so that any change of files, step number or config is found.
Format: docs/formats/checkpoint.md.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from moejax.errors import InputError

FORMAT_VERSION = 3  # 1 had no digest of its own, 2 no digests of numbers
MANIFEST = "moejax_manifest.json"
MANIFEST_BYTES = 256 << 20  # at most; a line for each file, and two for each expert
BLOCK = 4096  # bytes, of most file systems
THREADS = 4  # compute digests in parallel
# prefixes of files that operating systems leave
LEFT_BY_SYSTEMS = (".nfs", ".DS_Store", "._")


class DamagedError(InputError):
    """A checkpoint differs from what was written. The message says how."""


def finished_steps(directory: Path) -> list[int]:
    """Returns the steps that have a manifest."""
    names = [path.parent.name for path in directory.glob(f"*/{MANIFEST}")]
    return [int(name) for name in names if is_step(name)]


def is_step(name: str) -> bool:
    """Returns whether a directory's name is a step number."""
    return name.isascii() and name.isdigit() and name == str(int(name))


def write_manifest(
    path: Path,
    facts: dict[str, Any],
    version: int = FORMAT_VERSION,
    *,
    files: Mapping[str, dict[str, Any]] | None = None,
) -> None:
    """Records every file of a committed step.

    Args:
      files: results of `hash_files` in the processes; other files are hashed here.
    """
    known = dict(files or {})
    names = _names(path)
    known |= hash_named(path, [name for name in names if name not in known])
    listed = {name: known[name] for name in names}
    manifest = {"format_version": version, **facts, "files": listed}
    manifest["digest"] = digest_of(json.loads(json.dumps(manifest)))
    write_synced(path / MANIFEST, manifest, indent=1)


def write_synced(path: Path, value: Any, indent: int | None = None) -> None:
    """Writes JSON atomically, so that it survives a crash of the machine too."""
    beside = path.with_name(f"{path.name}.tmp")
    with beside.open("w", encoding="utf-8") as out:
        json.dump(value, out, indent=indent)
        out.flush()
        os.fsync(out.fileno())
    beside.rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # of names: without it the rename may be lost
    finally:
        os.close(folder)


def hash_files(path: Path, part: tuple[int, int] = (0, 1)) -> dict[str, dict[str, Any]]:
    """Returns the sizes and digests of a share, (index, count), of a step's files."""
    return hash_named(path, _names(path)[part[0] :: part[1]])


def hash_named(path: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Returns the sizes and digests of these files of a step."""
    with ThreadPoolExecutor(THREADS) as pool:
        digests = pool.map(sha256, [path / name for name in names])
        return {
            name: {"bytes": (path / name).stat().st_size, "sha256": digest}
            for name, digest in zip(names, digests, strict=True)
        }


def digest_of(manifest: dict[str, Any]) -> str:
    """Returns the digest of a manifest's content, without its own digest field."""
    content = {name: value for name, value in manifest.items() if name != "digest"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(path: Path) -> dict[str, Any]:
    """Returns the manifest of a step directory.

    Raises:
      DamagedError: if it differs from what was written, or is of another step.
      InputError: if it is missing, or a newer moejax wrote it.
    """
    file = path / MANIFEST
    if not file.is_file():
        files = sorted(p.name for p in path.iterdir()) if path.is_dir() else []
        raise InputError(
            f"no finished checkpoint at {path}. Found {', '.join(files[:8]) or 'nothing'}. A "
            f"finished one holds {MANIFEST}. Name a run directory or one of its checkpoints/STEP."
        )
    try:
        if file.stat().st_size > MANIFEST_BYTES:
            raise DamagedError(f"manifest has more than {MANIFEST_BYTES:,} bytes")
        manifest = json.loads(file.read_text(encoding="utf-8"))
        version = manifest["format_version"]
        _check_digest(manifest, version)
        if version <= FORMAT_VERSION:
            _check_fields(manifest)
    # Brackets nested thousands deep end json with RecursionError.
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = str(error) if isinstance(error, DamagedError) else f"manifest: {error!r}"
        raise DamagedError(reason) from error
    if version > FORMAT_VERSION:
        raise InputError(
            f"checkpoint of a newer moejax. {path} has format {version}. This version reads up to "
            f"{FORMAT_VERSION}. Upgrade moejax."
        )
    if is_step(path.name) and int(path.name) != manifest["step"]:
        raise DamagedError(f"its manifest is of step {manifest['step']}")
    return manifest


def _check_digest(manifest: dict[str, Any], version: Any) -> None:
    """Checks the manifest's digest, which only format 1 lacks."""
    if type(version) is not int or version < 1:
        raise DamagedError(f"manifest has format {version!r}")
    if version == 1 and "digest" not in manifest:
        return
    actual, expected = digest_of(manifest), str(manifest["digest"])
    if actual != expected:
        raise DamagedError(f"manifest has digest {actual[:12]}, expected {expected[:12]}")


def _check_fields(manifest: dict[str, Any]) -> None:
    """Checks the fields. Without asserts, because `python -O` leaves them out."""
    if type(manifest["step"]) is not int:
        raise DamagedError(f"manifest has step {manifest['step']!r}")
    if not manifest["files"]:
        raise DamagedError("manifest lists no file")
    _ = [(facts["bytes"], facts["sha256"]) for facts in manifest["files"].values()]


def stored_bytes(manifest: dict[str, Any]) -> int:
    """Returns a checkpoint's size on disk, in whole blocks."""
    return sum(-(-facts["bytes"] // BLOCK) * BLOCK for facts in manifest["files"].values())


def digest_of_pieces(sums: Iterable[int]) -> str:
    """Returns the digest of all pieces of the weights; it does not depend on their order.

    Args:
      sums: sums of the digests of pieces, each piece in one of them.
    """
    return f"{sum(sums) % (1 << 256):064x}"


def weights_digest(manifest: dict[str, Any]) -> str:
    """Returns a digest of a checkpoint's weights: of their numbers, if the manifest has one.

    Otherwise it is of the weights' files: names (which Orbax draws at random), sizes and digests.
    """
    if "numbers" in manifest:
        return str(manifest["numbers"])
    files = {
        name: facts for name, facts in manifest["files"].items() if name.startswith("weights/")
    }
    return digest_of(files)


def find_damage(
    path: Path, manifest: dict[str, Any], verify: str, part: tuple[int, int] = (0, 1)
) -> str | None:
    """Returns the damage of a checkpoint's files; None if they are intact.

    Args:
      verify: "full" compares digests, "size" only sizes.
      part: (index, count): compares the digests of this share of the files.
    """
    for name, facts in manifest["files"].items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != facts["bytes"]:
            return f"{name} has {file.stat().st_size} bytes, expected {facts['bytes']}"
    compared = list(manifest["files"])[part[0] :: part[1]] if verify == "full" else []
    with ThreadPoolExecutor(THREADS) as pool:
        digests = pool.map(sha256, [path / name for name in compared])
        for name, actual in zip(compared, digests, strict=True):
            expected = manifest["files"][name]["sha256"]
            if actual != expected:
                return f"{name} has digest {actual[:12]}, expected {expected[:12]}"
    unknown = next((name for name in _names(path) if name not in manifest["files"]), None)
    return None if unknown is None else f"{unknown} is not in the manifest"


def _names(path: Path) -> list[str]:
    """Returns a step's files by relative name, without the manifest."""
    own = (path / MANIFEST, path / f"{MANIFEST}.tmp")
    files = (file for file in path.rglob("*") if file.is_file() and file not in own)
    return sorted(
        file.relative_to(path).as_posix()
        for file in files
        if not file.name.startswith(LEFT_BY_SYSTEMS)
    )


def sha256(file: Path) -> str:
    """Returns the digest of a file's bytes."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
