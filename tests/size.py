"""How large each room is, and what is over the budget of docs/decisions/0013: `make size`."""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "moejax"
MODULES, LINES, FUNCTION = 12, 500, 50  # of a folder, of a module, of a function
CORE = ("config", "layout", "comm", "moe", "model", "step", "kernels")  # what a newcomer reads
FILES = 120  # of the core
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
