"""Writes config_defaults.json: what transformers makes of missing and null keys of config.json.

For each golden model of `models/`, in the form of released files: each key is left out, then null;
so is each key of `rope_scaling`. Kept is how the config that transformers makes of the rest differs
from that of the whole file, or that it makes no model. `rope` has the frequencies of positions, the
factor of cos and sin, and that of scores.

Needs `pip install torch==2.13.0 transformers==5.23.0`, in an environment of its own.
Command:  python tests/golden/config_defaults.py [FAMILY ...]
"""

import copy
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))
from tests.hf.config_keys import GOLDEN, of_positions, released, without  # noqa: E402
from tests.hf.golden import FAMILIES, cases_of  # noqa: E402

# Which transformers builds inside a model of images alone.
ONLY_INSIDE = transformers.Mistral4Config, transformers.Mistral4ForCausalLM
AutoModelForCausalLM.register(*ONLY_INSIDE, exist_ok=True)
TOKENS = 4
KINDS = ("", "sliding_attention_", "full_attention_")
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_linear", "mistral4")
LATENT += ("deepseek_v32", "glm_moe_dsa")


def frequencies_of(rope: torch.nn.Module, kind: str) -> list[float]:
    """The frequencies of positions: of all blocks, or of one kind (Gemma 4); [] without them."""
    found = getattr(rope, f"{kind}inv_freq", None)
    return [] if found is None else found.tolist()


def resolved(config: dict[str, Any], *, run: bool) -> dict[str, Any]:
    """The config that transformers makes of a file's.

    Args:
      run: whether a model of it must compute logits; else it is built without memory.
    """
    keys = copy.deepcopy(config)  # which transformers changes
    family = keys.pop("model_type")
    made = AutoConfig.for_model(family, **keys)
    made._attn_implementation = made._experts_implementation = "eager"
    with torch.device("cpu" if run else "meta"):
        model = AutoModelForCausalLM.from_config(made)
    if run:
        with torch.no_grad():
            model.float()(input_ids=torch.arange(TOKENS)[None])
    found = json.loads(made.to_json_string(use_diff=False))
    layers = [layer.self_attn for layer in model.model.layers if hasattr(layer, "self_attn")]
    if family not in LATENT and layers:  # some models compute it from other keys
        found["head_dim"] = layers[0].head_dim
    found.pop("transformers_version")
    if run and layers and hasattr(model.model, "rotary_emb"):
        rope, scores = model.model.rotary_emb, layers[0].scaling
        frequencies = [float(f"{x:.9g}") for kind in KINDS for x in frequencies_of(rope, kind)]
        scaling = getattr(rope, "attention_scaling", 1.0)
        found["rope"] = [*frequencies, float(scaling), float(scores)]
    return found


def difference(whole: dict[str, Any], config: dict[str, Any], *, run: bool) -> dict[str, Any] | str:
    """What changes with a file's config, and `absent` keys; the error's name if there is no model.

    A model's logits are computed where a key is null, or is of positions. Where another is missing,
    sizes may be large.

    Args:
      run: see `resolved`.
    """
    try:
        found = resolved(config, run=run)
    except Exception as error:  # whatever stops it
        return type(error).__name__
    changed = {key: value for key, value in found.items() if whole.get(key, ...) != value}
    gone = sorted(set(whole) - set(found) - {"rope"})
    return {**changed, "absent": gone} if gone else changed


def run_case(config: dict[str, Any]) -> dict[str, Any]:
    """The whole config, and what changes with each key."""
    whole = resolved(config, run=True)
    changes = {
        name: difference(whole, file, run=name.startswith("null") or of_positions(name))
        for name, file in without(config).items()
    }
    return {"whole": whole, "changes": changes}


def run_all(only: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """All cases by family and name.

    Args:
      only: families that are computed; the others' are those of the file. None: all.
    """
    transformers.logging.set_verbosity_error()
    kept = json.loads(GOLDEN.read_text())["cases"] if only else {}
    return {
        f"{family}: {name}": kept[f"{family}: {name}"]
        if only and family not in only
        else run_case(released(case["config"]))
        for family in FAMILIES
        for name, case in cases_of(family).items()
    }


def main() -> None:
    """Writes the file, with a line a change, anew for families of the command line, or all."""
    lines = []
    for name, case in run_all(sys.argv[1:]).items():
        changes = ",\n".join(
            f"{json.dumps(key)}: {json.dumps(value)}" for key, value in case["changes"].items()
        )
        whole = json.dumps(case["whole"])
        lines.append(f'{json.dumps(name)}: {{"whole": {whole}, "changes": {{\n{changes}}}}}')
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    text = f'{{"versions": {json.dumps(versions)}, "cases": {{\n' + ",\n".join(lines) + "}}\n"
    json.loads(text)
    GOLDEN.write_text(text)
    print(f"{GOLDEN}: {len(text):,} bytes")


if __name__ == "__main__":
    main()
