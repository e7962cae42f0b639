"""Writes models/FAMILY.json: what transformers computes with small random models of each family.

Needs `pip install torch==2.13.0 transformers==5.23.0`, in an environment of its own.
Command:  python tests/golden/make_models.py [FAMILY ...]

Weights are drawn from the names of tensors in files (`tests/hf/random_models.py`), so these files
hold none. Shapes are odd on purpose; of each family one case fits a mesh of expert and tensor axes.
Attention is eager, all is float32 on the CPU.
"""

import json
import math
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
from tests.hf.random_models import draw, draw_all, write_folder  # noqa: E402

SEQUENCES, PROMPT, CONTINUED = 2, 8, 32
POSITIONS = (0, 7, 22, 39)  # whose logits are kept
KEPT_IDS = 61  # of the vocabulary, evenly
CLOSE = 1e-4  # choices nearer than this could fall otherwise elsewhere

ODD = {"vocab_size": 997, "num_attention_heads": 13, "num_key_value_heads": 1}
EVEN = {"vocab_size": 96, "num_attention_heads": 12, "num_key_value_heads": 4}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LATENT = {"qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5, "hidden_size": 26}
LATENT_EVEN = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 6,
    "v_head_dim": 8,
    "hidden_size": 24,
    "vocab_size": 96,
}


def rope(scaling: dict, theta: float = 10_000.0) -> dict:
    """Positions as files have them."""
    return {"rope_theta": theta, "rope_scaling": scaling}


CASES: dict[str, dict[str, dict]] = {
    "mixtral": {
        "window, top 1": {
            **ODD,
            "hidden_size": 20,
            "head_dim": 6,
            "intermediate_size": 10,
            "num_local_experts": 5,
            "num_experts_per_tok": 1,
            "sliding_window": 9,
            "num_hidden_layers": 2,
        },
        "even, llama3 positions": {
            **EVEN,
            "hidden_size": 24,
            "head_dim": 6,
            "intermediate_size": 8,
            "num_local_experts": 24,
            "num_experts_per_tok": 6,
            "num_hidden_layers": 2,
            "tie_word_embeddings": True,
            **rope(LLAMA3, 1e6),
        },
    },
    "olmoe": {
        "top 3": {
            **ODD,
            "hidden_size": 52,
            "intermediate_size": 10,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "num_hidden_layers": 2,
        },
        "even, linear positions, biases": {
            **EVEN,
            "hidden_size": 48,
            "intermediate_size": 8,
            "num_experts": 24,
            "num_experts_per_tok": 6,
            "num_hidden_layers": 2,
            "norm_topk_prob": True,
            "attention_bias": True,
            "tie_word_embeddings": True,
            **rope({"rope_type": "linear", "factor": 3.0}),
        },
    },
    "qwen2_moe": {
        "first block dense, top 3": {
            **ODD,
            "num_attention_heads": 13,
            "hidden_size": 52,
            "intermediate_size": 14,
            "moe_intermediate_size": 10,
            "shared_expert_intermediate_size": 20,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "mlp_only_layers": [0],
            "num_hidden_layers": 3,
        },
        "even, windows by turns": {
            **EVEN,
            "hidden_size": 48,
            "intermediate_size": 16,
            "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 8,
            "num_experts": 24,
            "num_experts_per_tok": 6,
            "norm_topk_prob": True,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 4,
            "num_hidden_layers": 4,
            "tie_word_embeddings": True,
        },
    },
    "qwen3_moe": {
        "every second block dense, yarn": {
            **ODD,
            "hidden_size": 20,
            "head_dim": 6,
            "intermediate_size": 14,
            "moe_intermediate_size": 10,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "num_hidden_layers": 4,
            **rope(YARN, 1e6),
        },
        "even, window, tied": {
            **EVEN,
            "hidden_size": 24,
            "head_dim": 6,
            "intermediate_size": 16,
            "moe_intermediate_size": 8,
            "num_experts": 24,
            "num_experts_per_tok": 6,
            "use_sliding_window": True,
            "sliding_window": 9,
            "num_hidden_layers": 2,
            "tie_word_embeddings": True,
        },
    },
    "deepseek_v2": {
        "greedy, direct queries": {
            **ODD,
            **LATENT,
            "num_key_value_heads": 13,
            "q_lora_rank": None,
            "kv_lora_rank": 6,
            "intermediate_size": 14,
            "moe_intermediate_size": 10,
            "n_routed_experts": 5,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "first_k_dense_replace": 1,
            "num_hidden_layers": 3,
        },
        "even, groups, yarn": {
            **LATENT_EVEN,
            "q_lora_rank": 12,
            "kv_lora_rank": 8,
            "intermediate_size": 16,
            "moe_intermediate_size": 8,
            "n_routed_experts": 24,
            "n_shared_experts": 1,
            "num_experts_per_tok": 6,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 4.0,
            "first_k_dense_replace": 0,
            "num_hidden_layers": 2,
            "tie_word_embeddings": True,
            **rope({**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}),
        },
    },
    "deepseek_v3": {
        "one group, direct queries, another epsilon": {
            **ODD,
            **LATENT,
            "num_key_value_heads": 13,
            "q_lora_rank": None,
            "kv_lora_rank": 7,
            "intermediate_size": 14,
            "moe_intermediate_size": 10,
            "n_routed_experts": 5,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "num_hidden_layers": 3,
            "num_nextn_predict_layers": 0,
            "rms_norm_eps": 1e-3,
        },
        "even, groups, yarn": {
            **LATENT_EVEN,
            "q_lora_rank": 12,
            "kv_lora_rank": 8,
            "intermediate_size": 16,
            "moe_intermediate_size": 8,
            "n_routed_experts": 24,
            "n_shared_experts": 1,
            "num_experts_per_tok": 6,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "num_hidden_layers": 2,
            "num_nextn_predict_layers": 0,
            **rope({**YARN, "mscale": 1.0, "mscale_all_dim": 0.8}),
        },
    },
    "gpt_oss": {
        "top 3": {
            **ODD,
            "hidden_size": 20,
            "head_dim": 6,
            "intermediate_size": 10,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "sliding_window": 9,
            "num_hidden_layers": 2,
            **rope({**YARN, "factor": 8.0, "truncate": False}, 150_000.0),
        },
        "even": {
            **EVEN,
            "hidden_size": 24,
            "head_dim": 6,
            "intermediate_size": 8,
            "num_local_experts": 24,
            "num_experts_per_tok": 6,
            "sliding_window": 7,
            "num_hidden_layers": 4,
            "swiglu_limit": 0.5,
            "tie_word_embeddings": True,
            **rope({"rope_type": "default"}, 150_000.0),
        },
    },
    "glm4_moe": {
        "norm of heads, biases": {
            **ODD,
            "hidden_size": 20,
            "head_dim": 12,
            "intermediate_size": 14,
            "moe_intermediate_size": 10,
            "n_routed_experts": 5,
            "n_shared_experts": 1,
            "num_experts_per_tok": 3,
            "n_group": 1,
            "topk_group": 1,
            "use_qk_norm": True,
            "attention_bias": True,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "num_hidden_layers": 3,
            "num_nextn_predict_layers": 0,
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.5,
        },
        "even": {
            **EVEN,
            "hidden_size": 24,
            "head_dim": 8,
            "intermediate_size": 16,
            "moe_intermediate_size": 8,
            "n_routed_experts": 24,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 0,
            "num_hidden_layers": 2,
            "num_nextn_predict_layers": 0,
            "tie_word_embeddings": True,
            "partial_rotary_factor": 0.5,
        },
    },
    "minimax_m2": {
        "top 1": {
            **ODD,
            "hidden_size": 20,
            "head_dim": 6,
            "rotary_dim": 4,
            "intermediate_size": 10,
            "num_local_experts": 5,
            "num_experts_per_tok": 1,
            "num_hidden_layers": 2,
        },
        "even": {
            **EVEN,
            "hidden_size": 24,
            "head_dim": 8,
            "rotary_dim": 4,
            "intermediate_size": 8,
            "num_local_experts": 24,
            "num_experts_per_tok": 6,
            "num_hidden_layers": 2,
            "tie_word_embeddings": True,
        },
    },
}
ANYWHERE = {"max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": 1}


def tokens_of(name: str, vocab: int, length: int) -> np.ndarray:
    """Deterministic ids."""
    unit = draw(f"tokens of {name}", (SEQUENCES, length))
    return np.minimum((unit + 1) / 2 * vocab, vocab - 1).astype(np.int64)


def build(folder: Path, config: dict) -> tuple[torch.nn.Module, dict]:
    """A model with drawn weights, through a folder as the Hub has it, and its tensors' shapes."""
    family, settings = config["model_type"], {k: v for k, v in config.items() if k != "model_type"}
    made = AutoConfig.for_model(family, **ANYWHERE, eos_token_id=2, **settings)
    made._attn_implementation = "eager"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(made).float().save_pretrained(folder)
    shapes = {name: list(x.shape) for name, x in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    write_folder(folder, json.loads((folder / "config.json").read_text()), draw_all(shapes))
    model, info = AutoModelForCausalLM.from_pretrained(
        folder,
        attn_implementation="eager",
        experts_implementation="eager",
        dtype=torch.float32,
        output_loading_info=True,
    )
    assert not any(info.values()), info
    assert model.config._attn_implementation == "eager"
    return model.eval(), shapes


def record_choices(model: torch.nn.Module) -> list:
    """Hooks the routers; the list gets each layer's logits and chosen experts."""
    seen: list = []

    def hook(module, inputs, outputs):
        seen.append((outputs[0].detach(), outputs[2].detach()))

    routers = [m for m in model.modules() if type(m).__name__.lower().endswith("topkrouter")]
    assert routers
    for router in routers:
        router.register_forward_hook(hook)
    return seen


def gradient_tensors(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """The gradients, by the names that tensors have in files; parameters are overwritten."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            )
    with tempfile.TemporaryDirectory() as place:
        model.save_pretrained(place)
        return load_file(Path(place) / "model.safetensors")


def gradients_of(model: torch.nn.Module, shapes: dict) -> dict:
    """Norm and projection of each gradient, by the tensor's name in files."""
    found = {}
    for name, gradient in gradient_tensors(model).items():
        assert list(gradient.shape) == shapes[name]
        if name.endswith("e_score_correction_bias"):
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
    """Refuses routers' choices that are near ties; groups and biases bring them closer."""
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
