"""The command `moejax hf`: other people's models in, and ours out."""

import argparse
import sys
from pathlib import Path

from moejax.config.load import parse_overrides, split_overrides
from moejax.errors import InputError, exit_code
from moejax.hf.families import FAMILIES

EPILOG = """\
examples:
  moejax hf import downloads/Mixtral-8x7B-v0.1 --out imported/mixtral
  moejax prepare books/*.txt --tokenizer imported/mixtral/hf/tokenizer.json --out data/mixtral
  moejax train --config imported/mixtral/config.json
  moejax hf export runs/mixtral --out exported/mixtral

A folder is what huggingface_hub or git downloads: config.json, and safetensors files with their
index. Nothing of it is run, and nothing outside of it is read. Several processes share the work if
a launcher of launch/ starts them. Exit codes: docs/formats/exit.md.
"""
IMPORT_EPILOG = """\
example:
  moejax hf import downloads/OLMoE-1B-7B-0924 --out imported/olmoe

writes imported/olmoe/0 (weights), imported/olmoe/config.json (to train with) and imported/olmoe/hf
(tokenizer and texts). --config.FIELD=VALUE sets how to train, not what the model is.
"""
EXPORT_EPILOG = """\
example:
  moejax hf export runs/olmoe --out exported/olmoe --step 400
  moejax hf export runs/olmoe_lora --out exported/adapter --adapter

writes config.json, generation_config.json, model-0000k-of-0000n.safetensors of 5 GB at most with
their index, and copies tokenizer and texts. transformers, vLLM and lm-eval load the folder.
Adapters (LoRA) are added to the weights that they were trained on; --adapter writes them alone, as
peft reads them. --config.checkpoint.init_from=DIR says where those weights are, if they have moved.
"""


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    command = argparse.ArgumentParser(
        prog="moejax hf",
        description="Imports weights in the layout of Hugging Face, and exports them. Families: "
        f"{', '.join(family.name for family in FAMILIES)}.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = command.add_subparsers(dest="action", metavar="import|export", required=True)
    importing = actions.add_parser(
        "import",
        help="a folder of weights becomes a checkpoint",
        description="Writes a checkpoint and a config to train with.",
        epilog=IMPORT_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    importing.add_argument("path", type=Path, metavar="PATH", help="folder of weights")
    importing.add_argument("--out", type=Path, required=True, metavar="DIR", help="new folder")
    _add_dtype(importing, "float32", "bfloat16 takes half the room")
    importing.add_argument("--config.FIELD", metavar="VALUE", dest="_", help="set how to train")
    exporting = actions.add_parser(
        "export",
        help="a checkpoint becomes a folder of weights",
        description="Writes a folder that other libraries load.",
        epilog=EXPORT_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    exporting.add_argument(
        "path", type=Path, metavar="RUN", help="run directory, imported folder or checkpoint"
    )
    exporting.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="new folder")
    exporting.add_argument("--step", type=int, help="default: the newest")
    _add_dtype(exporting, "bfloat16", "float32 keeps every bit of a run's weights")
    exporting.add_argument(
        "--family", help="default: that of the first weights, else the first that fits"
    )
    exporting.add_argument(
        "--adapter", action="store_true", help="write the adapters of a LoRA run alone, for peft"
    )
    return command


def _add_dtype(action: argparse.ArgumentParser, default: str, why: str) -> None:
    action.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default=default,
        help=f"of the written weights (default {default}); {why}",
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

    export_run(
        args.path,
        args.out,
        step=args.step,
        dtype=args.dtype,
        family=args.family,
        adapter=args.adapter,
        base=_base(overrides),
    )


def _base(overrides: list[str]) -> str | None:
    """Returns the only setting that an export reads: where frozen weights are."""
    values = parse_overrides(overrides)
    base = values.pop("checkpoint.init_from", None)
    for name in values:
        raise InputError(
            f"`{name}` has no effect. An export reads checkpoint.init_from only. Leave it out."
        )
    return base


if __name__ == "__main__":
    sys.exit(main())
