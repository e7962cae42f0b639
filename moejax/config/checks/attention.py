"""Rules of attention: its heads, latents and window, linear attention, rotary positions."""

from moejax.config.checks.text import divisors_text, require
from moejax.config.pattern import settings_of
from moejax.config.schema import Config, ModelConfig, RopeConfig


def check_attention(cfg: Config) -> None:
    """Raises InputError at the first rule about the parts of attention that `cfg` breaks."""
    model = cfg.model
    if model.is_latent:
        _check_latent(model)
        if model.is_sparse:
            _check_sparse(model)
    else:
        require(
            model.num_heads % model.num_kv_heads == 0,
            f"`model.num_heads` = {model.num_heads} is not a multiple of `model.num_kv_heads` = "
            f"{model.num_kv_heads}. Choose {divisors_text(model.num_heads)} for "
            "model.num_kv_heads.",
        )
    if model.is_linear:
        _check_linear(model)
    require(
        not (model.zero_centered_norms and model.qk_norm == "full"),
        "`model.zero_centered_norms` is true and `model.qk_norm` is full. Norms over all heads are "
        "not built in that form. Set model.qk_norm=head, or model.zero_centered_norms=false.",
    )
    for window in (1, None):
        _check_rotated(settings_of(model, window))
    _check_full(model)
    every = model.full_attention_every
    require(
        every is None or every <= model.num_layers,
        f"`model.full_attention_every` = {every} leaves each of {model.num_layers} blocks "
        "without full attention. It must be at most `model.num_layers`; set none if none has it.",
    )
    _check_rope(model.rope)


def _check_full(model: ModelConfig) -> None:
    own, heads = model.full_attention, model.full_attention.num_kv_heads
    require(
        heads is None or model.num_heads % heads == 0,
        f"`model.num_heads` = {model.num_heads} is not a multiple of "
        f"`model.full_attention.num_kv_heads` = {heads}. Choose {divisors_text(model.num_heads)}.",
    )
    turned, width = own.turned_channels, own.head_width or model.head_width
    require(
        not own.keys_are_values or model.value_width in (None, width),
        f"`model.value_width` = {model.value_width} is not the {width} channels of a key, and "
        "`model.full_attention.keys_are_values` is true. Set model.value_width=none.",
    )
    if turned is None:
        return
    require(
        turned % 2 == 0 and turned <= width,
        f"`model.full_attention.turned_channels` = {turned} must be even, and at most the {width} "
        "channels of a head. Pairs of channels turn.",
    )
    require(
        model.rope_width is None and model.rope.scaling == "none",
        "`model.full_attention.turned_channels` goes with heads that rotate as a whole. Set "
        "model.rope_width=none and model.rope.scaling=none.",
    )


def _check_linear(model: ModelConfig) -> None:
    keys, values = model.linear.key_heads, model.linear.value_heads
    require(
        values % keys == 0,
        f"`model.linear.value_heads` = {values} is not a multiple of `model.linear.key_heads` = "
        f"{keys}. Choose {divisors_text(values)} for model.linear.key_heads.",
    )
    require(
        values == keys or model.linear.form != "kimi_delta",
        f"`model.linear.key_heads` = {keys} and `model.linear.value_heads` = {values} differ, and "
        "`model.linear.form` is kimi_delta: each head has keys and values. Make them equal.",
    )


def _check_latent(model: ModelConfig) -> None:
    for name in ("kv_latent", "rope_width"):
        require(
            getattr(model, name) is not None,
            f"`model.{name}` is none, but `model.attention` is {model.attention}, which needs it. "
            "Set it as "
            "the model's paper says, or model.attention=grouped.",
        )
    require(
        model.rotated_channels < model.head_width,
        f"`model.rope_width` = {model.rope_width} leaves none of `model.head_width` = "
        f"{model.head_width} for the part that does not rotate. In latent attention head_width is "
        "the sum of both: raise it, or lower rope_width.",
    )


def _check_sparse(model: ModelConfig) -> None:
    require(
        model.q_latent is not None,
        "`model.q_latent` is none, but `model.attention` is sparse, whose indexer has queries from "
        "it. Set it as the model's paper says, or model.attention=latent.",
    )
    require(
        model.sliding_window is None,
        f"`model.sliding_window` is {model.sliding_window}, and `model.attention` is sparse. Its "
        "indexer chooses among all earlier keys. Set model.sliding_window=none.",
    )
    require(
        model.rotated_channels <= model.indexer.width,
        f"`model.rope_width` = {model.rope_width} is more than `model.indexer.width` = "
        f"{model.indexer.width}. As many channels of the indexer's heads rotate. Raise the second.",
    )


def _check_rotated(model: ModelConfig) -> None:
    name = "head_width" if model.rope_width is None else "rope_width"
    rotated = model.rotated_channels
    require(
        rotated % 2 == 0 or not model.rotates,
        f"`model.{name}` = {rotated} is odd. Rotary positions turn pairs of channels. "
        f"Choose {rotated - 1} or {rotated + 1}.",
    )
    require(
        rotated <= model.head_width,
        f"`model.rope_width` = {rotated} is more than `model.head_width` = {model.head_width}. "
        "A head cannot rotate more channels than it has. Lower the first or raise the second.",
    )


def _check_rope(rope: RopeConfig) -> None:
    require(
        rope.scaling != "llama3" or rope.low_frequency_factor < rope.high_frequency_factor,
        f"`model.rope.low_frequency_factor` = {rope.low_frequency_factor} must be below "
        f"`model.rope.high_frequency_factor` = {rope.high_frequency_factor}. Lower the first "
        "or raise the second.",
    )
    # Kimi-K2 has 1 for both: no pair of channels is blended.
    require(
        rope.scaling != "yarn" or rope.beta_slow <= rope.beta_fast,
        f"`model.rope.beta_slow` = {rope.beta_slow} must not be above `model.rope.beta_fast` = "
        f"{rope.beta_fast}. Lower the first or raise the second.",
    )
    require(
        rope.scaling != "yarn" or rope.theta > 1,
        f"`model.rope.theta` = {rope.theta} leaves no channel pair that turns slower than another. "
        "yarn tells pairs apart by how fast they turn, so it must be above 1. Set it to the base "
        "that the model was trained with, or another `model.rope.scaling`.",
    )
    require(
        (rope.mscale is None) == (rope.mscale_all_dim is None),
        f"`model.rope.mscale` is {rope.mscale} and `model.rope.mscale_all_dim` is "
        f"{rope.mscale_all_dim}. Each has a meaning with the other alone. Set both (0 is a factor "
        "of one) or none.",
    )
    require(
        rope.attention_factor is None or rope.mscale is None,
        f"`model.rope.attention_factor` = {rope.attention_factor} and `model.rope.mscale` = "
        f"{rope.mscale} both say by what cos and sin are scaled. Set one of them to none.",
    )
