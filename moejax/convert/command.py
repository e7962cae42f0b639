"""The command `moejax hf`: other people's models in, and ours out."""

import argparse
import sys
import textwrap
from pathlib import Path

from moejax.config.command_line import Parser
from moejax.config.load import parse_overrides, split_overrides
from moejax.errors import InputError, exit_code
from moejax.hf.families import FAMILIES

ABOUT = "Imports weights in the layout of Hugging Face, and exports them."
EPILOG = """\
examples:
  moejax hf import downloads/OLMoE-1B-7B-0924 --out imported/olmoe
  moejax train --config imported/olmoe/config.json
  moejax hf export runs/olmoe --out exported/olmoe

A folder is what huggingface_hub or git downloads: config.json, and safetensors
files with their index. Nothing of it is run, and nothing outside of it is read.
Several processes share the work if a launcher of launch/ starts them.
"""
IMPORT_EPILOG = """\
example:
  moejax hf import downloads/OLMoE-1B-7B-0924 --out imported/olmoe

It writes imported/olmoe/0 (weights), imported/olmoe/config.json (to train with)
and imported/olmoe/hf (tokenizer and texts).
"""
EXPORT_EPILOG = """\
examples:
  moejax hf export runs/olmoe --out exported/olmoe --step 400
  moejax hf export runs/olmoe_lora --out exported/adapter --adapter
  moejax hf export runs/q --out exported/q --around downloads/Qwen3.5-35B-A3B

It writes config.json, generation_config.json and safetensors files of 5 GB at
most, and copies tokenizer and texts. transformers, vLLM and lm-eval load the
folder. Adapters (LoRA) are added to the weights that they were trained on;
--adapter writes them alone, as peft reads them. If those weights have moved,
--config.checkpoint.init_from=DIR says where to.
"""


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    families = ", ".join(family.name for family in FAMILIES)
    command = Parser(
        prog="moejax hf",
        description="\n".join(textwrap.wrap(f"{ABOUT} Families: {families}.", 78)),
        epilog=EPILOG,
    )
    actions = command.add_subparsers(dest="action", metavar="import|export", required=True)
    importing = actions.add_parser(
        "import",
        help="a folder of weights becomes a checkpoint",
        description="Writes a checkpoint and a config to train with.",
        epilog=IMPORT_EPILOG,
    )
    importing.add_argument("path", type=Path, metavar="PATH", help="folder of weights")
    importing.add_argument("--out", type=Path, required=True, metavar="DIR", help="new folder")
    add_dtype(importing, "float32", "bfloat16 takes half the room")
    importing.add_argument(
        "--config.FIELD", metavar="VALUE", dest="_", help="a setting of the written config"
    )
    exporting = actions.add_parser(
        "export",
        help="a checkpoint becomes a folder of weights",
        description="Writes a folder that other libraries load.",
        epilog=EXPORT_EPILOG,
    )
    exporting.add_argument(
        "path", type=Path, metavar="RUN", help="run directory, imported folder or checkpoint"
    )
    exporting.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="new folder")
    exporting.add_argument("--step", type=int, help="default: the newest")
    add_dtype(exporting, "bfloat16", "float32 keeps every bit of a run's weights")
    exporting.add_argument(
        "--family", help="default: the family of the first weights, else the first that fits"
    )
    exporting.add_argument(
        "--adapter", action="store_true", help="write the adapters of a LoRA run alone, for peft"
    )
    exporting.add_argument(
        "--around",
        type=Path,
        metavar="FOLDER",
        help="put the text model back into the model of images of this folder, which it came from",
    )
    return command


def add_dtype(action: argparse.ArgumentParser, default: str, why: str) -> None:
    """Adds the flags `--dtype`, whose default has a reason, and `--debug`."""
    action.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default=default,
        help=f"dtype of the written weights (default {default}); {why}",
    )
    action.add_argument("--debug", action="store_true", help="show tracebacks of bad input")


def main(argv: list[str] | None = None) -> int:
    """Runs the command. Returns the exit code."""
    rest, overrides = split_overrides(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(rest)
    return exit_code(
        lambda: run(args, overrides), stopped="nothing was written", debug=args.debug, files=True
    )


def run(args: argparse.Namespace, overrides: list[str]) -> None:
    """Imports or exports."""
    # Imported late, so that help comes at once.
    if args.action == "import":
        from moejax.convert.importing import import_folder

        import_folder(args.path, args.out, dtype=args.dtype, overrides=overrides)
        return
    from moejax.convert.exporting import export_run

    values = parse_overrides(overrides)
    base = values.pop("checkpoint.init_from", None)
    for name in values:
        raise InputError(
            f"`{name}` has no effect. An export reads checkpoint.init_from only. Leave it out."
        )
    export_run(
        args.path,
        args.out,
        step=args.step,
        dtype=args.dtype,
        family=args.family,
        adapter=args.adapter,
        base=base,
        around=args.around,
    )
