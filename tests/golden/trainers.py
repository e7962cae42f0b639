"""Writes `trainers.json`: the names of settings that other trainers' own parsers know.

The packages are read, not imported, so that neither torch nor a GPU is needed. Into any folder:

    pip download --no-deps --python-version 3.12 --only-binary=:all: --dest WHEELS \\
        maxtext==0.2.5 megatron-core==0.19.2 torchtitan==0.3.0
    for wheel in WHEELS/*.whl; do unzip -q -o "$wheel" -d FOLDER; done
    python tests/golden/trainers.py FOLDER

megatron-core carries Megatron-LM's parser (megatron/training/arguments.py): arguments that it adds
one by one, and arguments that it makes of the fields of dataclasses. On 2026-11-25, with torch,
the names were those of the parser that it builds (845); torchtitan's own parser and MaxText's
`pyconfig.initialize` took commands of these translations.
"""

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

# Functions of Megatron-LM that add arguments only where another package is installed.
OPTIONAL = ("_add_kitchen_quantization_arguments",)
GOLDEN = Path(__file__).with_suffix(".json")
SHAPE = (
    "base_emb_dim",
    "base_num_decoder_layers",
    "num_experts",
    "num_experts_per_tok",
    "base_moe_mlp_dim",
)


def version_of(folder: Path, package: str) -> str:
    """Returns the version of a package by its `dist-info`."""
    (info,) = folder.glob(f"{package}-*.dist-info")
    return info.name.removeprefix(f"{package}-").removesuffix(".dist-info")


def read_maxtext(folder: Path) -> dict:
    """Returns the keys of base.yml, values of some, and shapes of models with experts."""
    configs = folder / "maxtext" / "configs"
    base = yaml.safe_load((configs / "base.yml").read_text())
    models = {}
    for path in sorted((configs / "models").glob("*.yml")):
        values = yaml.safe_load(path.read_text())
        if set(SHAPE) <= set(values):
            models[path.stem] = [values[name] for name in SHAPE]
    return {
        "package": f"maxtext {version_of(folder, 'maxtext')}",
        "names": sorted(base),
        "choices": _remat_policies((configs / "base.yml").read_text()) | _locations(configs, base),
        "models": models,
    }


def _remat_policies(text: str) -> dict[str, list[str]]:
    """Returns the policies that the comment above `remat_policy` lists."""
    comment = text.split("# Choose 'remat_policy' between")[1].split("# These options")[0]
    return {"remat_policy": sorted(comment.split("'")[1::2])}


def _locations(configs: Path, base: dict) -> dict[str, list[str]]:
    """Returns the values of enumerations and literals that are written beside a field."""
    tree = ast.parse((configs / "types.py").read_text())
    named = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and "Enum" in ast.dump(ast.Module(node.bases, [])):
            assigned = (item for item in node.body if isinstance(item, ast.Assign))
            values = [item.value.value for item in assigned if isinstance(item.value, ast.Constant)]
            named[node.name] = values
    return {
        name: choices
        for name, annotation in _fields_of_all(tree)
        if name in base and (choices := _choices(annotation, named))
    }


def _fields_of_all(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node.annotation


def _choices(annotation: ast.expr, named: dict[str, list[str]]) -> list[str]:
    """Returns the texts that an annotation allows; empty: others too."""
    found = []
    for node in ast.walk(annotation):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("Literal"):
            inner = node.slice
            items = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            found += [item.value for item in items if isinstance(item, ast.Constant)]
        elif isinstance(node, ast.Name):
            found += named.get(node.id, [])
    return sorted(value for value in found if isinstance(value, str))


def read_megatron(folder: Path) -> dict:
    """Returns the arguments of pretrain_gpt.py, without dashes, and values of some."""
    root = folder / "megatron"
    arguments = ast.parse((root / "training" / "arguments.py").read_text())
    arguments.body = [n for n in arguments.body if getattr(n, "name", "") not in OPTIONAL]
    names: dict[str, list[str]] = {}
    for call in _calls(arguments, "add_argument"):
        flags = [a.value.removeprefix("--") for a in call.args if isinstance(a, ast.Constant)]
        given = {k.arg: ast.unparse(k.value) for k in call.keywords}
        choices = ast.literal_eval(given["choices"]) if given.get("choices", "")[:1] == "[" else []
        names |= {flag: [t for t in choices if isinstance(t, str)] for flag in flags}
        if given.get("action", "").endswith("BooleanOptionalAction"):
            names |= {f"no-{flag}": [] for flag in flags}
    classes = _dataclasses(root)
    for kind, excluded in _factories(arguments):
        for field in _inherited(kind, classes):
            if field.target.id not in excluded:
                names |= dict.fromkeys(_flags(field), _choices(field.annotation, {}))
    return {
        "package": f"megatron-core {version_of(folder, 'megatron_core')}",
        "names": sorted(names),
        "choices": {name: sorted(texts) for name, texts in sorted(names.items()) if texts},
    }


def _calls(tree: ast.AST, name: str) -> Iterator[ast.Call]:
    """Yields calls of a function or method."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            if (node.func.id if isinstance(node.func, ast.Name) else called) == name:
                yield node


def _factories(tree: ast.Module) -> Iterator[tuple[str, set[str]]]:
    """Yields the dataclasses of which arguments are made, and fields that are left out."""
    lists = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "exclude":
            lists["exclude"] = set(ast.literal_eval(node.value))
    for call in _calls(tree, "ArgumentGroupFactory"):
        excluded = next((k.value for k in call.keywords if k.arg == "exclude"), None)
        if isinstance(excluded, ast.Name):
            yield ast.unparse(call.args[0]), lists[excluded.id]
        else:
            yield ast.unparse(call.args[0]), set(ast.literal_eval(excluded) if excluded else ())


def _dataclasses(root: Path) -> dict[str, ast.ClassDef]:
    """Returns the classes of the files that hold dataclasses of settings."""
    files = [
        *(root / "training" / "config").glob("*.py"),
        *(root / "core").glob("*config*.py"),
        *(root / "core" / "transformer").glob("transformer_config.py"),
        *root.glob("**/fault_injector*.py"),
    ]
    found = {}
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name] = node
    return found


def _inherited(kind: str, classes: dict[str, ast.ClassDef]) -> Iterator[ast.AnnAssign]:
    """Yields the fields of a dataclass and of its bases."""
    node = classes.get(kind)
    if node is None:
        return
    for base in node.bases:
        yield from _inherited(ast.unparse(base), classes)
    for item in node.body:
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        if "init=False" not in ast.unparse(item):
            yield item


def _flags(field: ast.AnnAssign) -> list[str]:
    """Returns the arguments of a field: its own names, or --no-X and --disable-X if it is true."""
    for node in ast.walk(field):
        if isinstance(node, ast.Dict):
            keys = [k.value for k in node.keys if isinstance(k, ast.Constant)]
            if "arg_names" in keys:
                own = ast.literal_eval(node.values[keys.index("arg_names")])
                return [name.removeprefix("--") for name in own]
    name = field.target.id.replace("_", "-")
    value = field.value
    if isinstance(value, ast.Call):
        value = next((k.value for k in value.keywords if k.arg == "default"), None)
    if isinstance(value, ast.Constant) and value.value is True:
        return [f"no-{name}", f"disable-{name}"]
    return [name]


def read_torchtitan(folder: Path) -> dict:
    """Returns options of the sections that translations set, subcommands and registered configs."""
    root = folder / "torchtitan"
    tree = ast.parse((root / "config" / "configs.py").read_text())
    names, choices = {"module", "config"}, {}
    for section, kind in (("training", "TrainingConfig"), ("parallelism", "ParallelismConfig")):
        (node,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == kind)
        for field in _inherited(kind, {kind: node}):
            true = isinstance(field.value, ast.Constant) and field.value.value is True
            own = f"{section}.{'no-' if true else ''}{field.target.id}"
            names.add(own)
            if texts := _choices(field.annotation, {}):
                choices[own] = texts
    policies = ast.parse((root / "distributed" / "activation_checkpoint.py").read_text())
    for call in _calls(policies, "subcommand"):
        names.add(f"activation_checkpoint:{ast.literal_eval(call.args[0])}")
    registered = {}
    for path in sorted((root / "models").glob("*/config_registry.py")):
        functions = (n for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef))
        shown = [f.name for f in functions if not f.name.startswith("_")]
        registered[path.parent.name] = sorted(shown)
    return {
        "package": f"torchtitan {version_of(folder, 'torchtitan')}",
        "names": sorted(names),
        "choices": choices,
        "registered": registered,
    }


READERS = {"maxtext": read_maxtext, "megatron": read_megatron, "torchtitan": read_torchtitan}
# A file of each package, by which it is found.
FILES = {
    "maxtext": "maxtext/configs/base.yml",
    "megatron": "megatron/training/arguments.py",
    "torchtitan": "torchtitan/config/configs.py",
}

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    read = {name: reader(folder) for name, reader in READERS.items()}
    GOLDEN.write_text(json.dumps(read, indent=1) + "\n")
