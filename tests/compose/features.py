"""The features that combinations are drawn from, each with the settings that it changes.

A factor has several features, of which a combination takes one; the first changes nothing. Layers
are counted in patterns of blocks, which `config_of` multiplies.
"""

import math
from typing import Any

from moejax.config.checks import check, resolve_mesh
from moejax.config.compression import GRADIENTS, STAGES, TOKENS
from moejax.config.fields import change, fields
from moejax.config.schema import Config, RopeConfig

Changes = dict[str, Any]  # setting -> value

NONE: Changes = {}


def axes(**sizes: int) -> Changes:
    return {f"mesh.{axis}": size for axis, size in sizes.items()}


LATENT: Changes = {
    "model.attention": "latent",
    "model.head_width": 6,
    "model.rope_width": 2,
    "model.value_width": 8,
    "model.kv_latent": 8,
}
YARN = {"scaling": "yarn", "factor": 8.0, "trained_length": 16}

FACTORS: dict[str, dict[str, Changes]] = {
    "mesh": {
        "one device": NONE,
        "replica 2": axes(replica=2),
        "fsdp 4": axes(fsdp=4),
        "expert 4": axes(expert=4),
        "tensor 2": axes(tensor=2),
        "fsdp 2, expert 2": axes(fsdp=2, expert=2),
        "expert 2, tensor 2": axes(expert=2, tensor=2),
        "replica 2, fsdp 2, expert 2, tensor 2": axes(replica=2, fsdp=2, expert=2, tensor=2),
    },
    "nodes": {"one node": NONE, "two nodes": {"mesh.nodes": 2}, "four nodes": {"mesh.nodes": 4}},
    "stages": {
        "no stages": NONE,
        "2 stages": axes(stage=2),
        "2 stages, inputs kept": {"mesh.stage": 2, "mesh.stage_keeps": "input"},
        "2 stages, both passes combined": {"mesh.stage": 2, "mesh.schedule": "combined_1f1b"},
        "2 stages, 2 chunks": {"mesh.stage": 2, "model.stage_chunks": 2},
        "2 stages, 2 slices": {"mesh.stage": 2, "mesh.stage_slices": 2},
        "2 stages, layers before": {"mesh.stage": 2, "model.layers_before_stages": 1},
    },
    "micro-batches": {"1 micro-batch": NONE, "4 micro-batches": {"train.micro_batches": 4}},
    "route": {
        "split": NONE,
        "duplicate": {"route": "duplicate"},
        "merge": {"route": "merge"},
        "two_level": {"route": "two_level"},
        "two_level_merge": {"route": "two_level_merge"},
    },
    "pieces": {
        "in one piece": NONE,
        "3 and 2 chunks": {"route_chunks": 3, "route_chunks_backward": 2},
        "trimmed": {"route_trim": True},
    },
    "capacity": {
        "dropless": NONE,
        "buckets that hold all": {"moe.capacity_factor": 16.0},
        "dropless, wide buckets": {"moe.headroom": 3.0},
    },
    "layout": {
        "sequence, hidden": NONE,
        "sequence, folded": {"mesh.expert_weights": "folded"},
        "sequence, whole": {"mesh.expert_weights": "whole"},
        "replicated, hidden": {"mesh.activations": "replicated"},
        "replicated, folded": {
            "mesh.activations": "replicated",
            "mesh.expert_weights": "folded",
        },
    },
    "dense weights": {
        "gathered at each use": NONE,
        "gathered once a step": {"mesh.gather_dense": "step"},
    },
    "weights across nodes": {
        "flat": NONE,
        "at each use": {"mesh.gather_across": "use"},
        "once for both passes": {"mesh.gather_across": "passes", "model.remat": "full"},
        "once a step": {"mesh.gather_across": "step"},
    },
    "reduction": {
        "whole gradients": NONE,
        "pieces of 2,000 bytes": {"train.reduction_bytes": 2_000},
        "in bfloat16": {"train.gradient_dtype": "bfloat16"},
    },
    "recomputed": {
        name: {"model.remat": name} if name != "none" else NONE
        for name in fields()["model.remat"].choices
    },
    "loop": {"layers in a loop": NONE, "layers unrolled": {"model.scan_layers": False}},
    "blocks": {
        "experts in every block": NONE,
        "first dense": {"model.first_dense_layers": 1},
        "experts in each second": {"model.moe_every": 2},
        "no experts": {"model.moe_every": None},
    },
    "attention": {
        "grouped": NONE,
        "window": {"model.sliding_window": 5},
        "window in each second": {"model.sliding_window": 5, "model.full_attention_every": 2},
        "sinks, biases, yarn": {
            "model.attention_sinks": True,
            "model.attention_bias": True,
            "model.attention_output_bias": True,
            "model.head_width": 8,
            "model.rope_width": 6,
            "model.rope": RopeConfig(**YARN, truncate=False, attention_factor=1.2),
        },
        "norms of heads": {"model.qk_norm": "head"},
        "norms of all heads": {"model.qk_norm": "full"},
        "latent": LATENT,
        "latent of queries, window": LATENT
        | {
            "model.q_latent": 8,
            "model.sliding_window": 5,
            "model.rope": RopeConfig(**YARN, mscale=0.7, mscale_all_dim=1.0),
        },
    },
    "sequences": {
        "whole": NONE,
        "2 devices share": {"mesh.context": 2, "mesh.context_stripe": 4},
        "4 devices share, ring": {
            "mesh.context": 4,
            "mesh.context_stripe": 2,
            "mesh.context_exchange": "ring",
        },
    },
    "documents": {"apart": NONE, "joined": {"data.isolate_documents": False}},
    "router": {
        "softmax": NONE,
        "sigmoid": {"moe.router.score": "sigmoid"},
        "softmax, groups": {"moe.router.num_groups": 4, "moe.router.groups_per_token": 2},
        "sigmoid, groups, bias moved": {
            "moe.router.score": "sigmoid",
            "moe.router.num_groups": 4,
            "moe.router.groups_per_token": 2,
            "moe.router.bias_update_rate": 0.01,
            "moe.router.balance_loss": 0.0,
        },
        "not renormalised, balance by sequence": {
            "moe.router.renormalize": False,
            "moe.router.weight_scale": 2.5,
            "moe.router.balance_over": "sequence",
        },
        "jitter": {"moe.router.jitter": 0.2},
        "one expert a token": {"moe.experts_per_token": 1, "moe.router.renormalize": False},
        "all experts a token": {"moe.experts_per_token": 8},
    },
    "experts": {
        "plain": NONE,
        "shared": {"moe.num_shared_experts": 2},
        "shared, gated": {"moe.num_shared_experts": 2, "moe.shared_gate": True},
        "biases, clamped": {
            "moe.expert_bias": True,
            "moe.router_bias": True,
            "model.activation": "clamped_swiglu",
            "model.activation_limit": 0.5,
        },
    },
    "prediction": {
        "next token": NONE,
        "two tokens": {"model.predict_ahead": 1, "train.predict_ahead_loss": 0.7},
    },
    "embeddings": {"tied": NONE, "untied": {"model.tie_embeddings": False}},
    "adapters": {
        "all weights": NONE,
        "adapters": {"lora.rank": 4},
        "adapters of everything": {"lora.rank": 2, "lora.alpha": 3.0, "lora.targets": ("*",)},
    },
    "optimizer": {
        "AdamW": NONE,
        "Muon": {"optimizer.name": "muon"},
        "AdamW, no clipping": {"optimizer.clip_norm": None},
    },
    "codecs": {
        "no codec": NONE,
        "hybrid": {"compression.preset": "hybrid"},
        "strong": {"compression.preset": "strong"},
        "bfloat16 everywhere": {
            f"compression.{kind}": "bfloat16" for kind in (*GRADIENTS, *TOKENS, "weights", *STAGES)
        },
    },
    "numbers": {"float32": NONE, "bfloat16": {"model.dtype": "bfloat16"}},
}
FEATURES = {(factor, feature) for factor, features in FACTORS.items() for feature in features}
# With these a step rounds more than float32 does, so the oracle is met nearly.
ROUNDED = {
    ("numbers", "bfloat16"),
    ("reduction", "in bfloat16"),
    *(("codecs", name) for name in FACTORS["codecs"] if name != "no codec"),
}

Combination = tuple[tuple[str, str], ...]  # (factor, feature), a feature of each factor, in order
BASE: Changes = {
    "model.vocab_size": 264,
    "model.width": 32,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.head_width": 4,
    "model.init_deviation": 0.3,
    "moe.num_experts": 8,
    "moe.experts_per_token": 2,
    "moe.expert_hidden": 16,
    "moe.router.balance_loss": 0.1,
    "moe.router.z_loss": 0.01,
    "data.sequence_length": 16,
    "train.batch_sequences": 32,
    "train.num_steps": 20,
    "optimizer.warmup_steps": 0,
    "optimizer.learning_rate": 3e-3,
    "train.compare_every": None,
}


def plain() -> Combination:
    """The combination that changes nothing."""
    return tuple((factor, next(iter(features))) for factor, features in FACTORS.items())


def is_rounded(combination: Combination) -> bool:
    """Whether a step with these features rounds more than float32 does; codecs that left do too."""
    return dict(combination)["codecs"] != "no codec" or not ROUNDED.isdisjoint(combination)


def name(combination: Combination) -> str:
    """Returns the features that are not the first of their factor."""
    usual = set(plain())
    return "; ".join(feature for factor, feature in combination if (factor, feature) not in usual)


def config_of(combination: Combination) -> Config:
    """Returns the combination's config, not yet checked."""
    settings = dict(BASE)
    if ("blocks", "no experts") in combination:  # what says nothing of the combination
        settings = {key: value for key, value in settings.items() if not key.startswith("moe.")}
    for factor, feature in combination:
        settings |= FACTORS[factor][feature]
    return change(Config(), settings | _in_patterns(settings))


def enlarged(cfg: Config) -> Config:
    """Returns the config in sizes that kernels for GPUs and TPUs take."""
    model = cfg.model
    sizes: Changes = {"model.width": 1024, "data.sequence_length": 512, "model.dtype": "bfloat16"}
    sizes |= {
        f"model.{name}": 8 * getattr(model, name)
        for name in ("head_width", "rope_width", "value_width", "kv_latent", "q_latent")
        if getattr(model, name) is not None
    }
    if model.has_experts:
        sizes["moe.expert_hidden"] = 512
    return change(cfg, sizes)


def _in_patterns(settings: Changes) -> Changes:
    """Numbers of layers in patterns of blocks: before the stages, and two for each part of them."""
    patterns = ("model.full_attention_every", "model.moe_every")
    pattern = math.lcm(*(settings.get(name) or 1 for name in patterns))
    before = pattern * settings.get("model.layers_before_stages", 0)
    parts = 2 * settings.get("model.stage_chunks", 1)
    layers = settings.get("model.first_dense_layers", 0) + before + parts * pattern
    return {"model.num_layers": layers, "model.layers_before_stages": before}


def check_combination(combination: Combination) -> Config:
    """Returns the resolved config.

    Raises:
      InputError: if features do not go together.
    """
    cfg = config_of(combination)
    check(cfg)
    mesh = cfg.mesh
    devices = (mesh.replica or 1) * mesh.fsdp * mesh.expert * mesh.tensor * mesh.stage
    return resolve_mesh(cfg, devices, "cpu", processes=1)
