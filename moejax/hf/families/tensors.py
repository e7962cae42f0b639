"""Rules that several families share. Letters: see `moejax/layout/layout.py`; Z is a latent."""

from dataclasses import replace

from moejax.hf.rules import Rule

GATE, UP = (("U", 0),), (("U", 1),)

ROOT = (
    Rule("embedding.table", "model.embed_tokens.weight", "V D"),
    Rule("embedding.project", "lm_head.weight", "V D"),
    Rule("norm.scale", "model.norm.weight"),
)
NORMS = (
    Rule("attention_norm.scale", "input_layernorm.weight"),
    Rule("mlp_norm.scale", "post_attention_layernorm.weight"),
)
# Norms of inputs and of results (AFMoE).
FOUR_NORMS = (
    Rule("attention_norm.scale", "input_layernorm.weight"),
    Rule("attention_out_norm.scale", "post_attention_layernorm.weight"),
    Rule("mlp_norm.scale", "pre_mlp_layernorm.weight"),
    Rule("mlp_out_norm.scale", "post_mlp_layernorm.weight"),
)
GROUPED = (
    Rule("attention.w_q", "self_attn.q_proj.weight", "HC D"),
    Rule("attention.w_k", "self_attn.k_proj.weight", "GC D"),
    Rule("attention.w_v", "self_attn.v_proj.weight", "GC D"),
    Rule("attention.w_o", "self_attn.o_proj.weight", "D HC"),
    Rule("attention.b_q", "self_attn.q_proj.bias"),
    Rule("attention.b_k", "self_attn.k_proj.bias"),
    Rule("attention.b_v", "self_attn.v_proj.bias"),
    Rule("attention.b_o", "self_attn.o_proj.bias"),
    Rule("attention.q_norm.scale", "self_attn.q_norm.weight"),
    Rule("attention.k_norm.scale", "self_attn.k_norm.weight"),
    Rule("attention.sinks", "self_attn.sinks"),
)
# All channels of a head rotate, in pairs (ERNIE).
PAIRED = tuple(
    replace(rule, paired="C") if rule.ours in ("attention.w_q", "attention.w_k") else rule
    for rule in GROUPED
)
# Of blocks with a window alone, by the name of released files (MiMo).
SINKS = Rule("attention.sinks", "self_attn.attention_sink_bias")
# A head's last channels rotate, in pairs. The key that rotates follows the latent of keys and
# values.
LATENT = (
    Rule("attention.w_q", "self_attn.q_proj.weight", "HC D", paired="C"),
    Rule("attention.w_dq", "self_attn.q_a_proj.weight", "Z D"),
    Rule("attention.q_norm.scale", "self_attn.q_a_layernorm.weight"),
    Rule("attention.w_uq", "self_attn.q_b_proj.weight", "HC Z", paired="C"),
    Rule("attention.w_dkv", "self_attn.kv_a_proj_with_mqa.weight", "Z D", paired="Z"),
    Rule("attention.kv_norm.scale", "self_attn.kv_a_layernorm.weight"),
    Rule("attention.w_ukv", "self_attn.kv_b_proj.weight", "HC Z"),
    Rule("attention.w_o", "self_attn.o_proj.weight", "D HC"),
)

# The indexer of sparse attention, whose first channels rotate: as halves (DeepSeek-V3.2), or in
# pairs (GLM-5). What DeepSeek's code has in float32 stays so.
INDEXER = (
    Rule("attention.indexer.w_q", "self_attn.indexer.wq_b.weight", "IJ Z"),
    Rule("attention.indexer.w_k", "self_attn.indexer.wk.weight", "J D"),
    Rule("attention.indexer.k_scale", "self_attn.indexer.k_norm.weight", wide=True),
    Rule("attention.indexer.k_bias", "self_attn.indexer.k_norm.bias", wide=True),
)
PAIRED_INDEXER = tuple(replace(rule, paired="J", leading=True) for rule in INDEXER)
INDEX_WEIGHTS = Rule(
    "attention.indexer.w_weights", "self_attn.indexer.weights_proj.weight", "I D", wide=True
)

# Nothing rotates, so no channels are paired (Kimi Linear).
UNPAIRED = tuple(replace(rule, paired="") for rule in LATENT)

# Queries of a head, then its gate.
WITH_GATE = ("attention.w_q", "attention.w_gate")
GATED = (
    *(
        Rule(own, "self_attn.q_proj.weight", "HC D", joins=WITH_GATE, each=("attention.w_q", "H"))
        for own in WITH_GATE
    ),
    *(rule for rule in GROUPED if rule.ours != "attention.w_q"),
)
# Of each key head its query, its key, the values and the gates of its value heads.
_CONVOLVED = tuple(f"attention.convolve_{name}" for name in "qkv")
_JOINED = tuple(f"attention.w_{name}" for name in ("q", "k", "v", "gate"))
_OF_HEADS = ("attention.w_beta", "attention.w_fade")
_EACH = ("attention.w_q", "G")
_DIMS = ("GC", "GC", "HC", "HC")
_DELTA = (
    *(
        Rule(own, "linear_attn.conv1d.weight", f"{dims} 1 X", joins=_CONVOLVED)
        for own, dims in zip(_CONVOLVED, _DIMS, strict=False)
    ),
    Rule("attention.log_rate", "linear_attn.A_log"),
    Rule("attention.fade_bias", "linear_attn.dt_bias"),
    Rule("attention.scale", "linear_attn.norm.weight"),
    Rule("attention.w_o", "linear_attn.out_proj.weight", "D HC"),
)
DELTA = (
    *(
        Rule(own, "linear_attn.in_proj_qkvz.weight", f"{dims} D", joins=_JOINED, each=_EACH)
        for own, dims in zip(_JOINED, _DIMS, strict=True)
    ),
    *(
        Rule(own, "linear_attn.in_proj_ba.weight", "H D", joins=_OF_HEADS, each=_EACH)
        for own in _OF_HEADS
    ),
    *_DELTA,
)
# All queries, all keys, all values; gates and factors of heads in tensors of their own.
DELTA_APART = (
    *(
        Rule(own, "linear_attn.in_proj_qkv.weight", f"{dims} D", joins=_JOINED[:3])
        for own, dims in zip(_JOINED[:3], _DIMS, strict=False)
    ),
    Rule("attention.w_gate", "linear_attn.in_proj_z.weight", "HC D"),
    Rule("attention.w_beta", "linear_attn.in_proj_b.weight", "H D"),
    Rule("attention.w_fade", "linear_attn.in_proj_a.weight", "H D"),
    *_DELTA,
)

KIMI = (
    Rule("attention.w_q", "self_attn.q_proj.weight", "GC D"),
    Rule("attention.w_k", "self_attn.k_proj.weight", "GC D"),
    Rule("attention.w_v", "self_attn.v_proj.weight", "HC D"),
    *(
        Rule(own, f"self_attn.{own[-1]}_conv1d.weight", f"{dims} 1 X")
        for own, dims in zip(_CONVOLVED, _DIMS, strict=False)
    ),
    Rule("attention.w_beta", "self_attn.b_proj.weight", "H D"),
    Rule("attention.w_gate_down", "self_attn.g_a_proj.weight", "Z D"),
    Rule("attention.w_gate_up", "self_attn.g_b_proj.weight", "HC Z"),
    Rule("attention.log_rate", "self_attn.A_log", "1 1 H 1", wide=True),
    Rule("attention.fade_bias", "self_attn.dt_bias", "HC", wide=True),
    Rule("attention.scale", "self_attn.o_norm.weight"),
    Rule("attention.w_o", "self_attn.o_proj.weight", "D HC"),
)

# A layer has one norm and one mixer. Rows of Mamba-2's first matrix: the gates, the values, the
# keys, the queries, the time steps (Nemotron-H).
_IN_LAYER = "backbone.layers.{L}."
_MIXER = f"{_IN_LAYER}mixer."
_IN_ORDER = ("v", "k", "q")
_OF_MAMBA = {
    "in_proj.weight": ("w_gate", *(f"w_{name}" for name in _IN_ORDER), "w_step"),
    "conv1d.weight": tuple(f"convolve_{name}" for name in _IN_ORDER),
    "conv1d.bias": tuple(f"bias_{name}" for name in _IN_ORDER),
}
_AS_IN = {"in_proj.weight": "{} D", "conv1d.weight": "{} 1 X", "conv1d.bias": "{}"}
_ROWS_OF = {"gate": "HC", "v": "HC", "k": "GC", "q": "GC", "step": "H"}
MAMBA = (
    *(
        Rule(
            f"attention.{own}",
            f"{_MIXER}{theirs}",
            _AS_IN[theirs].format(_ROWS_OF[own.rpartition("_")[2]]),
            joins=tuple(f"attention.{name}" for name in joined),
        )
        for theirs, joined in _OF_MAMBA.items()
        for own in joined
    ),
    Rule("attention.log_rate", f"{_MIXER}A_log"),
    Rule("attention.step_bias", f"{_MIXER}dt_bias"),
    Rule("attention.skip", f"{_MIXER}D"),
    Rule("attention.scale", f"{_MIXER}norm.weight", "HC"),
    Rule("attention.w_o", f"{_MIXER}out_proj.weight", "D HC"),
)
NEMOTRON_H_TENSORS = (
    Rule("embedding.table", "backbone.embeddings.weight", "V D"),
    Rule("embedding.project", "lm_head.weight", "V D"),
    Rule("norm.scale", "backbone.norm_f.weight"),
    Rule("attention_norm.scale", f"{_IN_LAYER}norm.weight"),
    Rule("mlp_norm.scale", f"{_IN_LAYER}norm.weight"),
    Rule("moe.w_router", f"{_MIXER}gate.weight", "E D"),
    Rule("moe.bias", f"{_MIXER}gate.e_score_correction_bias", wide=True),
    Rule("moe.w_down", f"{_MIXER}fc1_latent_proj.weight", "Z D"),
    Rule("moe.w_up", f"{_MIXER}fc2_latent_proj.weight", "D Z"),
    *(
        rule
        for place, block in (("", "dense"), ("shared_experts.", "moe"))
        for rule in (
            Rule("mlp.w_in", f"{_MIXER}{place}up_proj.weight", "F D", GATE, block=block),
            Rule("mlp.w_out", f"{_MIXER}{place}down_proj.weight", "D F", block=block),
        )
    ),
    *(
        replace(rule, theirs=rule.theirs.replace("self_attn.", _MIXER), block="grouped")
        for rule in GROUPED
    ),
    *(replace(rule, block="mamba2") for rule in MAMBA),
)
UNGATED_EXPERTS = (
    (
        Rule("moe.w_in", f"{_MIXER}experts.{{E}}.up_proj.weight", "F D", GATE),
        Rule("moe.w_out", f"{_MIXER}experts.{{E}}.down_proj.weight", "D F"),
    ),
    (
        Rule("moe.w_in", f"{_MIXER}experts.up_proj", "E UF D"),
        Rule("moe.w_out", f"{_MIXER}experts.down_proj", "E D F"),
    ),
)

# Multi-token prediction: a layer of attention, and one of experts (Nemotron 3 Super).
_AHEAD_LAYERS = "mtp.layers.0.", "mtp.layers.1."
_ATTENDS = ("attention_norm", "attention.")


def _ahead_of_nemotron(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Returns the rules of layers for the block that joins both layers."""
    return tuple(
        replace(
            rule,
            theirs=rule.theirs.replace(
                _IN_LAYER, _AHEAD_LAYERS[not rule.ours.startswith(_ATTENDS)]
            ),
            ahead=True,
        )
        for rule in rules
        if rule.theirs.startswith(_IN_LAYER) and rule.block not in ("dense", "mamba2")
    )


AHEAD_OF_NEMOTRON = (
    *_ahead_of_nemotron(NEMOTRON_H_TENSORS),
    Rule("predict_ahead.embedding_norm.scale", "mtp.layers.0.enorm.weight", ahead=True),
    Rule("predict_ahead.hidden_norm.scale", "mtp.layers.0.hnorm.weight", ahead=True),
    Rule("predict_ahead.w_join", "mtp.layers.0.eh_proj.weight", "O UD", ahead=True),
    Rule("predict_ahead.norm.scale", "mtp.layers.1.final_layernorm.weight", ahead=True),
)
UNGATED_EXPERTS = tuple((*form, *_ahead_of_nemotron(form)) for form in UNGATED_EXPERTS)

# Multi-token prediction: a layer after the last, with norms and a projection of its own. Files of
# DeepSeek-V3 hold the embedding and the head there once more.
AHEAD = (
    Rule("predict_ahead.embedding_norm.scale", "enorm.weight"),
    Rule("predict_ahead.hidden_norm.scale", "hnorm.weight"),
    Rule("predict_ahead.w_join", "eh_proj.weight", "O UD"),
    Rule("predict_ahead.norm.scale", "shared_head.norm.weight"),
)
# A norm of its own before the shared head, by another name (Hy3, MiMo).
FINAL_NORM = Rule("predict_ahead.norm.scale", "final_layernorm.weight")
AHEAD_COPIES = (
    Rule("embedding.table", "embed_tokens.weight", "V D"),
    Rule("embedding.project", "shared_head.head.weight", "V D"),
)


def of_blocks(kind: str, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Returns rules for the blocks of one kind, as of `Rule.block`."""
    return tuple(replace(rule, block=kind) for rule in rules)


def ahead_at(prefix: str, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Returns rules of layers for the module of multi-token prediction, whose names begin so."""
    return tuple(replace(rule, theirs=prefix + rule.theirs, ahead=True) for rule in rules)


def mlp(prefix: str, block: str) -> tuple[Rule, ...]:
    """Returns the rules of a dense MLP, or of shared experts in a block with experts."""
    return (
        Rule("mlp.w_in", f"{prefix}gate_proj.weight", "F D", GATE, block=block),
        Rule("mlp.w_in", f"{prefix}up_proj.weight", "F D", UP, block=block),
        Rule("mlp.w_out", f"{prefix}down_proj.weight", "D F", block=block),
    )


def experts(prefix: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """Returns the rules of experts that are a tensor each."""
    return (
        Rule("moe.w_in", f"{prefix}experts.{{E}}.{gate}.weight", "F D", GATE),
        Rule("moe.w_in", f"{prefix}experts.{{E}}.{up}.weight", "F D", UP),
        Rule("moe.w_out", f"{prefix}experts.{{E}}.{down}.weight", "D F"),
    )


def fused_experts(prefix: str) -> tuple[Rule, ...]:
    """Returns the rules of a layer's experts in two tensors, as transformers 5 holds them."""
    return (
        Rule("moe.w_in", f"{prefix}experts.gate_up_proj", "E UF D"),
        Rule("moe.w_out", f"{prefix}experts.down_proj", "E D F"),
    )


def router(prefix: str) -> tuple[Rule, ...]:
    """Returns the rule of the router."""
    return (Rule("moe.w_router", f"{prefix}gate.weight", "E D"),)


def selection_bias(name: str) -> tuple[Rule, ...]:
    """Returns the rule of the selection bias; it stays in float32."""
    return (Rule("moe.bias", name, wide=True),)


# Norms on both sides of attention, of the MLP and of the experts; one of their sum (Gemma 4).
ALL_NORMS = (
    Rule("attention_norm.scale", "input_layernorm.weight"),
    Rule("attention_out_norm.scale", "post_attention_layernorm.weight"),
    Rule("mlp_norm.scale", "pre_feedforward_layernorm.weight"),
    Rule("shared_out_norm.scale", "post_feedforward_layernorm_1.weight"),
    Rule("experts_norm.scale", "pre_feedforward_layernorm_2.weight"),
    Rule("experts_out_norm.scale", "post_feedforward_layernorm_2.weight"),
    Rule("mlp_out_norm.scale", "post_feedforward_layernorm.weight"),
    Rule("layer_scale", "layer_scalar"),
)

DENSE = mlp("mlp.", "dense")
SHARED = mlp("mlp.shared_experts.", "moe")
EXPERTS = experts("mlp.", "gate_proj", "up_proj", "down_proj")
FUSED = fused_experts("mlp.")

SHARED_EXPERT = (
    *mlp("mlp.shared_expert.", "moe"),
    Rule("shared_gate", "mlp.shared_expert_gate.weight", "1 D"),
)

# The module for multi-token prediction, whose experts may be stored as those of layers are, or in
# the other form.
_AHEAD = "mtp.layers.0."
AHEAD_OF_QWEN = (
    *ahead_at(
        "mtp.",
        (
            Rule("predict_ahead.embedding_norm.scale", "pre_fc_norm_embedding.weight"),
            Rule("predict_ahead.hidden_norm.scale", "pre_fc_norm_hidden.weight"),
            Rule("predict_ahead.w_join", "fc.weight", "O UD"),
            Rule("predict_ahead.norm.scale", "norm.weight"),
        ),
    ),
    *ahead_at(_AHEAD, (*NORMS, *GATED, *router("mlp."), *SHARED_EXPERT)),
)
EXPERTS_OF_QWEN = tuple(
    (*own, *ahead_at(_AHEAD, ahead))
    for own, ahead in ((EXPERTS, EXPERTS), (EXPERTS, FUSED), (FUSED, EXPERTS), (FUSED, FUSED))
)

# Tensors of a model whose router has a selection bias (DeepSeek-V3, GLM), without attention.
BIASED = (
    *ROOT,
    *NORMS,
    *DENSE,
    *SHARED,
    *router("mlp."),
    *selection_bias("mlp.gate.e_score_correction_bias"),
    *AHEAD,
)

_SPARSE = experts("block_sparse_moe.", gate="w1", up="w3", down="w2")
SPARSE_EXPERTS = (
    _SPARSE,
    fused_experts("block_sparse_moe."),
    fused_experts("mlp."),
)


def _kimi(dense: str, shared: str, fade: str) -> tuple[Rule, ...]:
    return (
        *mlp(dense, "dense"),
        *mlp(f"{shared}shared_experts.", "moe"),
        Rule("attention.w_fade_down", f"self_attn.{fade}f_a_proj.weight", "Z D"),
        Rule("attention.w_fade_up", f"self_attn.{fade}f_b_proj.weight", "HC Z"),
    )


# As in released files; as transformers saves them, which renames dense MLPs too; and as its model
# names them, for adapters.
KIMI_EXPERTS = (
    (*_kimi("mlp.", "block_sparse_moe.", ""), *_SPARSE),
    (*_kimi("block_sparse_moe.", "block_sparse_moe.", ""), *_SPARSE),
    (*_kimi("mlp.", "mlp.", "forget_gate."), *FUSED),
)
