"""Published models by shape, and the names that other trainers give to them."""

from moejax.config.schema import Config

# (width, layers, routed experts, experts per token, hidden width of an expert)
Shape = tuple[int, int, int, int, int]

MIXTRAL_8X7B: Shape = (4096, 32, 8, 2, 14336)
MIXTRAL_8X22B: Shape = (6144, 56, 8, 2, 16384)
QWEN3_30B_A3B: Shape = (2048, 48, 128, 8, 768)
QWEN3_235B_A22B: Shape = (4096, 94, 128, 8, 1536)
DEEPSEEK_V2_LITE: Shape = (2048, 27, 64, 6, 1408)
DEEPSEEK_V2: Shape = (5120, 60, 160, 6, 1536)
DEEPSEEK_V3: Shape = (7168, 61, 256, 8, 2048)
KIMI_K2: Shape = (7168, 61, 384, 8, 2048)
GPT_OSS_20B: Shape = (2880, 24, 32, 4, 2880)
GPT_OSS_120B: Shape = (2880, 36, 128, 4, 2880)

# `model_name` of MaxText 0.2.5 (maxtext/configs/models).
MAXTEXT: dict[Shape, str] = {
    MIXTRAL_8X7B: "mixtral-8x7b",
    MIXTRAL_8X22B: "mixtral-8x22b",
    QWEN3_30B_A3B: "qwen3-30b-a3b",
    QWEN3_235B_A22B: "qwen3-235b-a22b",
    DEEPSEEK_V2_LITE: "deepseek2-16b",
    DEEPSEEK_V2: "deepseek2-236b",
    DEEPSEEK_V3: "deepseek3-671b",
    KIMI_K2: "kimi-k2-1t",
    GPT_OSS_20B: "gpt-oss-20b",
    GPT_OSS_120B: "gpt-oss-120b",
}


# `--module` and `--config` of torchtitan 0.3.0 (torchtitan/models/*/config_registry.py).
TORCHTITAN: dict[Shape, tuple[str, str]] = {
    QWEN3_30B_A3B: ("qwen3", "qwen3_30b_a3b"),
    DEEPSEEK_V2_LITE: ("deepseek_v3", "deepseek_v3_16b"),
    DEEPSEEK_V3: ("deepseek_v3", "deepseek_v3_671b"),
    GPT_OSS_20B: ("gpt_oss", "gpt_oss_20b"),
    GPT_OSS_120B: ("gpt_oss", "gpt_oss_120b"),
}


def shape_of(cfg: Config) -> Shape:
    """Returns the numbers by which published models are told apart."""
    model, moe = cfg.model, cfg.moe
    experts = (moe.num_experts, moe.experts_per_token, moe.expert_hidden)
    return (model.width, model.num_layers, *experts)
