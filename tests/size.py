"""How large each room is, and what is over the budget of docs/decisions/0013: `make size`."""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "moejax"
MODULES, LINES, FUNCTION = 12, 500, 50  # of a folder, of a module, of a function
SMALL = 75  # lines of a module that is worth a file for one importer
# Smaller ones with one importer, each for a reason that decision 0013 names.
ALONE = ("api", "checkpoint.load", "data.prepare.flags")
ALONE += ("settings", "train.faults.replicas")
USERS = ("moejax", "benchmarks", "launch")  # what may import a module
CORE = ("config", "layout", "comm", "moe", "model", "step", "kernels")  # what a newcomer reads
FILES = 126  # of the core
README = 600, 90  # words and lines
KERNELS = "mosaic"  # a kernel is one function, and as long as it has to be


def modules() -> list[Path]:
    """Every module of the package, but for the files that only describe a folder."""
    return sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")


def core() -> list[Path]:
    """Modules of the core."""
    return [path for path in modules() if path.relative_to(PACKAGE).parts[0] in CORE]


def lines(path: Path) -> int:
    """Lines of a file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def over() -> Iterator[str]:
    """Yields what is over the budget."""
    folders = {path.parent for path in modules()}
    for folder in sorted(folders):
        count = sum(path.parent == folder for path in modules())
        if count > MODULES:
            yield f"{folder.relative_to(PACKAGE.parent)} has {count} modules, of {MODULES}"
    for path in modules():
        name = path.relative_to(PACKAGE.parent)
        if lines(path) > LINES:
            yield f"{name} has {lines(path)} lines, of {LINES}"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                and KERNELS not in name.parts
            ):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > FUNCTION:
                    yield f"{name}: {node.name} has {length} lines, of {FUNCTION}"
    yield from small()


def small() -> Iterator[str]:
    """Yields small modules that one file imports, and that are no exception."""
    importers: dict[str, set[Path]] = {}
    for path in (path for user in USERS for path in (PACKAGE.parent / user).rglob("*.py")):
        for name in imported(path):
            importers.setdefault(name, set()).add(path)
    for path in modules():
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        few = len(importers.get(f"moejax.{name}", ())) == 1
        if few and lines(path) < SMALL and name not in ALONE:
            yield f"{name} has {lines(path)} lines, of {SMALL}, and one importer"


def imported(path: Path) -> Iterator[str]:
    """Yields the modules that a file imports, and the names that it takes from them."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


def table() -> str:
    """Modules and lines of each room, largest first."""
    rooms: dict[str, list[int]] = {}
    for path in modules():
        parts = path.relative_to(PACKAGE).parts
        rooms.setdefault(parts[0] if len(parts) > 1 else ".", []).append(lines(path))
    rows = sorted(rooms.items(), key=lambda item: -sum(item[1]))
    rows.append(("all", [count for _, counts in rows for count in counts]))
    return "\n".join(
        f"{room:<12}{len(counts):>5} modules{sum(counts):>8,} lines" for room, counts in rows
    )


if __name__ == "__main__":
    print(table())
    print(*over(), sep="\n")
