"""Writes models/FAMILY.json: what transformers computes with small random models of each family.

Needs `pip install torch==2.13.0 transformers==5.23.0`, in an environment of its own.
Command:  python tests/golden/make_models.py [FAMILY ...]

Weights are drawn from the names of tensors in files (`tests/hf/random_models.py`), so these files
hold none. Shapes are odd on purpose; of each family one case fits a mesh of expert and tensor axes.
Attention is eager, all is float32 on the CPU.
"""

import copy
import json
import math
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoModelForCausalLM

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))
from tests.golden.model_cases import CASES  # noqa: E402
from tests.hf.random_models import SELECTION_BIASES, draw, draw_all, write_folder  # noqa: E402

SEQUENCES, PROMPT, CONTINUED = 2, 8, 32
POSITIONS = (0, 7, 22, 39)  # whose logits are kept
KEPT_IDS = 61  # of the vocabulary, evenly
CLOSE = 1e-4  # choices nearer than this could fall otherwise elsewhere

# Which transformers builds inside a model of images alone.
ONLY_INSIDE = transformers.Mistral4Config, transformers.Mistral4ForCausalLM
AutoModelForCausalLM.register(*ONLY_INSIDE, exist_ok=True)
ANYWHERE = {"max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": 1}


# Dense MLPs of Kimi Linear have another name in released files than transformers saves.
RENAMED = (r"\.block_sparse_moe\.(\w+_proj\.)", r".mlp.\1")


def released(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a file that transformers saved, by the names of released files."""
    return {re.sub(*RENAMED, name): values for name, values in load_file(path).items()}


def tokens_of(name: str, vocab: int, length: int) -> np.ndarray:
    """Deterministic ids."""
    unit = draw(f"tokens of {name}", (SEQUENCES, length))
    return np.minimum((unit + 1) / 2 * vocab, vocab - 1).astype(np.int64)


def build(folder: Path, config: dict) -> tuple[torch.nn.Module, dict]:
    """A model with drawn weights, through a folder as the Hub has it, and its tensors' shapes."""
    # A copy: transformers writes into dictionaries that it is given, which cases share.
    settings = copy.deepcopy({k: v for k, v in config.items() if k != "model_type"})
    family = config["model_type"]
    made = AutoConfig.for_model(family, **ANYWHERE, eos_token_id=2, **settings)
    made._attn_implementation = "eager"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(made).float().save_pretrained(folder)
    shapes = {name: list(x.shape) for name, x in released(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    write_folder(folder, json.loads((folder / "config.json").read_text()), draw_all(shapes))
    model = load(folder)
    assert model.config._attn_implementation == "eager"
    return model, shapes


def load(folder: Path) -> torch.nn.Module:
    """The model of a folder; every tensor of it has a place, and every place a tensor."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder,
        attn_implementation="eager",
        experts_implementation="eager",
        dtype=torch.float32,
        output_loading_info=True,
    )
    assert not any(info.values()), info
    return model.eval()


def record_choices(model: torch.nn.Module) -> list:
    """Hooks the routers; the list gets the logits and chosen experts of each layer with experts."""
    seen: list = []

    def hook(module, inputs, outputs):
        seen.append((outputs[0].detach(), outputs[2].detach()))

    named = ("topkrouter", "v1gate", "textrouter", "tokenchoicerouter")
    routers = [m for m in model.modules() if type(m).__name__.lower().endswith(named)]
    keys = ("num_experts_per_tok", "top_k_experts")
    assert bool(routers) == any(hasattr(model.config, key) for key in keys)
    for router in routers:
        router.register_forward_hook(hook)
    return seen


def gradient_tensors(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """The gradients, by the names that tensors have in files; parameters are overwritten.

    Numbers that are not trained (`layer_scalar`) have none.
    """
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.zero_()
        for parameter in model.parameters():
            parameter.copy_(
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            )
    with tempfile.TemporaryDirectory() as place:
        model.save_pretrained(place)
        return released(Path(place) / "model.safetensors")


def gradients_of(model: torch.nn.Module, shapes: dict) -> dict:
    """Norm and projection of each gradient, by the tensor's name in files."""
    found = {}
    for name, gradient in gradient_tensors(model).items():
        assert list(gradient.shape) == shapes[name]
        if name.endswith(SELECTION_BIASES):
            continue
        direction = draw(f"direction of {name}", gradient.shape).astype(np.float64)
        projection = np.sum(gradient * direction) / math.sqrt(np.sum(direction**2))
        found[name] = [digits(np.linalg.norm(gradient.astype(np.float64))), digits(projection)]
    return found


def digits(value: float) -> float:
    """A number with the digits of a float32."""
    return float(f"{value:.9g}")


def continued(model: torch.nn.Module, prompt: np.ndarray) -> list[int]:
    """The greedy continuation, without a cache; refuses near ties."""
    ids = list(map(int, prompt))
    for _ in range(CONTINUED):
        with torch.no_grad():
            last = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        best = torch.topk(last, 2).values
        assert best[0] - best[1] > CLOSE, "a near tie"
        ids.append(int(last.argmax()))
    return ids[len(prompt) :]


def check_margins(name: str, choices: list) -> None:
    """Refuses routers' logits that are near ties."""
    for logits, chosen in choices:
        values = torch.sort(logits, dim=-1).values
        gap = (values[:, 1:] - values[:, :-1]).min()
        if gap < 1e-7:
            raise AssertionError(f"{name}: logits of two experts are {gap} apart")
        assert chosen.shape[0] == logits.shape[0]


def run_case(family: str, name: str, settings: dict) -> dict:
    """All numbers of one model."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model, shapes = build(folder, {"model_type": family, **settings})
        config = json.loads((folder / "config.json").read_text())
        length = POSITIONS[-1] + 1
        token_BT = tokens_of(name, config["vocab_size"], length)
        prompt = token_BT[0, :PROMPT]
        greedy = continued(model, prompt)
        choices = record_choices(model)
        ids = torch.tensor(token_BT)
        result = model(input_ids=ids, labels=ids, use_cache=False)
        check_margins(name, choices)
        logits = result.logits.detach().numpy()[:, list(POSITIONS)].astype(np.float64)
        top = logits.max(axis=-1, keepdims=True)
        logsum = top[..., 0] + np.log(np.exp(logits - top).sum(axis=-1))
        kept = np.linspace(0, config["vocab_size"] - 1, KEPT_IDS).astype(int)
        loss = result.loss
        loss.backward()
        return {
            "name": name,
            "config": config,
            "tensors": shapes,
            "tokens": token_BT.tolist(),
            "positions": list(POSITIONS),
            "ids": kept.tolist(),
            "logits": [[[digits(x) for x in row] for row in rows] for rows in logits[..., kept]],
            "logsumexp": [[digits(x) for x in row] for row in logsum],
            "largest": digits(np.abs(logits).max()),
            "choices": [sorted_choices(chosen) for _, chosen in choices],
            "loss": digits(loss.item()),
            "gradients": gradients_of(model, shapes),
            "greedy": greedy,
        }


def sorted_choices(chosen: torch.Tensor) -> list[str]:
    """The experts of each token, in order of their numbers."""
    return [
        " ".join(map(str, sorted(row))) for row in chosen.reshape(-1, chosen.shape[-1]).tolist()
    ]


def write(path: Path, found: dict) -> None:
    """Writes JSON with a line an entry, so that a change is seen where it is."""
    lines = ["{", f'"versions": {json.dumps(found["versions"])},', '"cases": [']
    for number, case in enumerate(found["cases"]):
        lines.append("{")
        lines += [
            f"{json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}"
            + ("," if key != "greedy" else "")
            for key, value in case.items()
        ]
        lines.append("}," if number + 1 < len(found["cases"]) else "}")
    path.write_text("\n".join([*lines, "]}"]) + "\n")


def main() -> None:
    """Writes the families that the command line names, or all."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for family in sys.argv[1:] or CASES:
        cases = [run_case(family, name, settings) for name, settings in CASES[family].items()]
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        path = HERE / "models" / f"{family}.json"
        write(path, {"versions": versions, "cases": cases})
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
