"""Writes published_counts.json: how many parameters transformers builds for published configs.

Needs `pip install torch==2.13.0 transformers==5.23.0`, in an environment of its own.
Command:  python tests/golden/count_published.py

The models of `tests/hf/published.json` are built on torch's meta device, which holds shapes and no
numbers. What is counted are parameters that train: selection biases are not counted. transformers
has no count of active parameters; here they are what one token uses: all but the routed experts
that it does not choose.
"""

import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.modeling_layers import MtpModel

# Which transformers builds inside a model of images alone.
ONLY_INSIDE = transformers.Mistral4Config, transformers.Mistral4ForCausalLM
AutoModelForCausalLM.register(*ONLY_INSIDE, exist_ok=True)
HERE = Path(__file__).parent
PUBLISHED = HERE.parent / "hf" / "published.json"
COUNTS = HERE / "published_counts.json"
# Code of the authors, which is not run, and how the weights are stored, not which there are.
LEFT_OUT = ("auto_map", "quantization_config")
SAME_CODE = {"kimi_k2": "deepseek_v3"}  # as its `architectures` says


def config_of(settings: dict[str, Any]) -> PreTrainedConfig:
    """The config as transformers reads it from a folder."""
    kept = {key: value for key, value in settings.items() if key not in LEFT_OUT}
    kept["model_type"] = SAME_CODE.get(kept["model_type"], kept["model_type"])
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "config.json").write_text(json.dumps(kept))
        with warnings.catch_warnings():  # of `rope_scaling`, which released files have
            warnings.simplefilter("ignore", FutureWarning)
            return AutoConfig.from_pretrained(place)


def parameters_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Its parameters by name, each once; ERNIE's selection bias is one that is not trained.

    Constants of blocks (Gemma 4), which files hold and transformers does not train, are counted.
    """
    constants = [(n, b) for n, b in module.named_buffers() if n.endswith("layer_scalar")]
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    return dict([*trained, *constants])


def active_of(name: str, parameter: torch.Tensor, config: PreTrainedConfig) -> int:
    """How many elements of a parameter a token uses."""
    if ".experts." not in name:  # `shared_experts` are used by every token
        return parameter.numel()
    experts = parameter.shape[0]
    assert parameter.numel() % experts == 0, name
    # Hunyuan lists one for each layer, and Gemma has another name for it.
    choices = getattr(config, "num_experts_per_tok", None) or config.top_k_experts
    chosen = choices[0] if isinstance(choices, list) else choices
    return parameter.numel() // experts * chosen


def count(settings: dict[str, Any]) -> dict[str, int]:
    """Total and active parameters; of the layers that predict further tokens, too, if it has any.

    Those are left out by `AutoModelForCausalLM`, which shares its embedding and head with them.
    """
    config = config_of(settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        own = parameters_of(model)
        found = {
            "total": sum(parameter.numel() for parameter in own.values()),
            "active": sum(active_of(*item, config) for item in own.items()),
        }
        layers = settings.get("num_nextn_predict_layers", 0)
        if layers and hasattr(config, "num_mtp_layers"):  # some classes have no such module
            shared = {id(parameter) for parameter in own.values()}
            ahead = parameters_of(MtpModel(model, layers))
            ahead = {name: p for name, p in ahead.items() if id(p) not in shared}
            found["ahead_total"] = sum(parameter.numel() for parameter in ahead.values())
            found["ahead_active"] = sum(active_of(*item, config) for item in ahead.items())
    return found


def count_all() -> dict[str, dict[str, int]]:
    """The counts of all published models."""
    return {name: count(config) for name, config in json.loads(PUBLISHED.read_text()).items()}


def main() -> None:
    """Writes the counts."""
    transformers.logging.set_verbosity_error()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    lines = [f" {json.dumps(name)}: {json.dumps(counts)}" for name, counts in count_all().items()]
    text = ",\n".join(lines)
    COUNTS.write_text(f'{{"versions": {json.dumps(versions)}, "counts": {{\n{text}\n}}}}\n')
    print(COUNTS.read_text())


if __name__ == "__main__":
    main()
