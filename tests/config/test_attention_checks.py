"""Rules between the settings of attention and rotary positions."""

import pytest

from moejax.config.checks import check
from moejax.config.load import from_dict
from moejax.errors import InputError

LATENT = {"model.attention": "latent", "model.kv_latent": 16, "model.rope_width": 8}
YARN = {"model.rope.scaling": "yarn", "model.rope.factor": 2.0}


def error_of(values):
    """Returns the message of the InputError of a config; always a single line."""
    with pytest.raises(InputError) as caught:
        check(from_dict(values))
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 400
    return message


@pytest.mark.parametrize(
    "values",
    [
        LATENT,
        {**LATENT, "model.q_latent": 24, "model.value_width": 48, "model.num_heads": 3},
        {**LATENT, "model.sliding_window": 4, "model.full_attention_every": 4},
        {**LATENT, **YARN, "model.rope.mscale": 1.0, "model.rope.mscale_all_dim": 0.0},
        {"model.rope_width": 8, "model.head_width": 33},
        {"model.rope_width": 32},
        {"model.attention_sinks": True, "model.attention_output_bias": True},
        {**YARN, "model.rope.truncate": False, "model.rope.attention_factor": 1.1},
    ],
)
def test_settings_that_fit_together_pass(values):
    check(from_dict(values))


@pytest.mark.parametrize(
    ("values", "fragments"),
    [
        ({"model.attention": "latent"}, ["`model.kv_latent` is none", "which needs it"]),
        ({**LATENT, "model.rope_width": None}, ["`model.rope_width` is none", "is latent"]),
        (
            {**LATENT, "model.rope_width": 32},
            ["`model.rope_width` = 32 leaves none of `model.head_width` = 32"],
        ),
        ({"model.rope_width": 7}, ["`model.rope_width` = 7 is odd", "6 or 8"]),
        ({"model.rope_width": 34}, ["`model.rope_width` = 34", "`model.head_width` = 32"]),
        (
            {"model.sliding_window": 4, "model.full_attention_every": 5},
            ["`model.full_attention_every` = 5", "each of 4 blocks"],
        ),
        (
            {**LATENT, "mesh.fsdp": 3, "model.width": 129, "train.batch_sequences": 3},
            ["`model.kv_latent` = 16", "= 3 x 1 = 3", "15 or 18 for model.kv_latent"],
        ),
        ({**YARN, "model.rope.mscale": 1.0}, ["`model.rope.mscale_all_dim` is None", "Set both"]),
        (
            {
                **YARN,
                "model.rope.mscale": 1.0,
                "model.rope.mscale_all_dim": 1.0,
                "model.rope.attention_factor": 1.2,
            },
            ["`model.rope.attention_factor` = 1.2", "`model.rope.mscale` = 1.0"],
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(values, fragments):
    message = error_of(values)
    for fragment in fragments:
        assert fragment in message


@pytest.mark.parametrize(
    ("values", "name", "reason"),
    [
        ({"model.kv_latent": 16}, "model.kv_latent", "`model.attention` is not latent"),
        ({"model.q_latent": 16}, "model.q_latent", "is not latent"),
        ({"model.value_width": 16}, "model.value_width", "is not latent"),
        ({**LATENT, "model.num_kv_heads": 4}, "model.num_kv_heads", "`model.attention` is latent"),
        *(
            ({**LATENT, f"model.{name}": value}, f"model.{name}", "`model.attention` is latent")
            for name, value in [
                ("qk_norm", "head"),
                ("attention_bias", True),
                ("attention_output_bias", True),
                ("attention_sinks", True),
            ]
        ),
        (
            {"model.full_attention_every": 2},
            "model.full_attention_every",
            "`model.sliding_window` is none",
        ),
        *(
            (
                {"model.rope.scaling": "linear", "model.rope.factor": 2.0, f"model.rope.{n}": v},
                f"model.rope.{n}",
                "only `model.rope.scaling` yarn",
            )
            for n, v in [
                ("truncate", False),
                ("attention_factor", 1.5),
                ("mscale", 0.7),
                ("mscale_all_dim", 0.7),
            ]
        ),
    ],
)
def test_a_setting_without_effect_is_refused(values, name, reason):
    message = error_of(values)
    assert message.startswith(f"`{name}` = ")
    assert "has no effect" in message
    assert reason in message
