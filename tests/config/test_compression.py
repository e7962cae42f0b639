import pytest

from moejax.config.compression import GRADIENTS, NO_COMPRESSION, CodecSpec, build_compression
from moejax.config.load import load_config
from moejax.config.schema import CompressionConfig, LoraConfig
from moejax.errors import InputError


def build(**settings):
    return build_compression(CompressionConfig(**settings))


def only(**settings):
    """The codecs of a policy that never changes."""
    ((start, codecs),) = build(**settings).stretches
    assert start == 0
    return codecs


def test_a_preset_fills_what_is_not_set():
    assert build() == NO_COMPRESSION
    feedback = CodecSpec("int8", feedback=True)
    assert only(preset="hybrid").dense_gradient == feedback
    changed = only(preset="hybrid", expert_gradient="none", block=64)
    assert changed.expert_gradient is None
    assert changed.dense_gradient == CodecSpec("int8", feedback=True, block=64)


@pytest.mark.parametrize("preset", ["hybrid", "strong"])
def test_presets_have_no_feedback_between_stages_and_plans_that_have_it_are_read(preset):
    """It makes gradients of weights worse. Presets had it until 2026-11-28."""
    assert only(preset=preset).stage_gradient == CodecSpec("int8")
    former = only(preset=preset, stage_gradient="int8+feedback")
    assert former.stage_gradient == CodecSpec("int8", feedback=True)


@pytest.mark.parametrize(
    "text",
    [
        "bfloat16",
        "int4+feedback",
        "e4m3+feedback",
        "loco",
    ],
)
def test_a_codec_is_written_as_it_is_read(text):
    assert str(only(dense_gradient=text).dense_gradient) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int3", "none or one of bfloat16, int8"),
        ("int4+feedbak", "no flag feedbak"),
        ("int4+stochastic", "+stochastic was removed"),
        ("topk:0.01+feedback", "topk was removed: use int4+feedback"),
        ("adaptive:0.9:int8|int4", "adaptive was removed: use int4+feedback"),
        ("loco+feedback", "feedback of its own"),
        ("int8:4", "none or one of bfloat16, int8"),
        ("powersgd:4", "powersgd was removed: use int4+feedback"),
        ("int8,int4", "each later one names its step"),
        ("int8@0", "each later one names its step"),
        ("none,int8@10,int4@10", "steps must grow"),
        ("int8+feedback,loco@10", "state of loco"),
    ],
)
def test_what_is_no_codec_is_refused_with_its_setting(text, message):
    with pytest.raises(InputError) as error:
        build(dense_gradient=text)
    assert str(error.value).startswith(f"`compression.dense_gradient` is `{text}`. ")
    assert message in str(error.value)


@pytest.mark.parametrize("kind", ["dispatch", "combine", "combine_backward", "weights"])
@pytest.mark.parametrize("text", ["int8+feedback", "loco"])
def test_what_remembers_serves_gradients_only(kind, text):
    with pytest.raises(InputError, match="Only gradients of weights"):
        build(**{kind: text})


def test_stages_start_where_any_class_changes():
    policy = build(dense_gradient="none,int8@10", dispatch="int4,int8@5,bfloat16@20")
    found = [(start, str(c.dense_gradient), str(c.dispatch)) for start, c in policy.stretches]
    assert found == [
        (0, "None", "int4"),
        (5, "None", "int8"),
        (10, "int8", "int8"),
        (20, "int8", "bfloat16"),
    ]
    assert [str(policy.at(step).dispatch) for step in (0, 4, 5, 19, 20, 99)] == [
        *("int4", "int4", "int8", "int8", "bfloat16", "bfloat16")
    ]
    assert [str(spec) for spec in policy.all_of("dispatch")] == [
        *("int4", "int8", "int8", "bfloat16")
    ]


def test_the_group_may_be_named_by_its_preset(tmp_path):
    (tmp_path / "c.yaml").write_text("compression: strong\n")
    assert load_config(tmp_path / "c.yaml").compression.preset == "strong"
    changed = load_config(tmp_path / "c.yaml", ["compression=hybrid"])
    assert changed.compression.preset == "hybrid"
    by_class = "compression={dense_gradient: int8+feedback, dispatch: 'none,int8@5', block: 64}"
    changed = load_config(tmp_path / "c.yaml", ["compression=none", by_class]).compression
    assert (changed.preset, changed.dense_gradient, changed.block) == ("none", "int8+feedback", 64)
    assert changed.dispatch == "none,int8@5"


def test_a_preset_keeps_its_codecs_of_tokens_alone():
    policy = build(preset="strong").without(GRADIENTS)
    now = policy.at(0)
    assert (now.dense_gradient, now.expert_gradient) == (None, None)
    assert now.dispatch == build(preset="strong").at(0).dispatch
    gradients = build(dense_gradient="none,int4+feedback@5")
    assert gradients.without(GRADIENTS) == NO_COMPRESSION


def test_the_scale_of_adapters_is_alpha_over_rank_and_two_by_default():
    assert LoraConfig(rank=8, alpha=4.0).scale == 0.5
    assert LoraConfig(rank=8).scale == 2.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{dense: int8}", "unknown field `compression.dense`"),
        ("{block: 3}", "`compression.block`"),
        ("{block: 8, block: 8}", "set twice"),
        ("{block", "override compression, line 1"),
    ],
)
def test_a_group_of_settings_in_one_override_is_checked_as_files_are(tmp_path, text, message):
    (tmp_path / "c.yaml").write_text("{}")
    with pytest.raises(InputError, match=message):
        load_config(tmp_path / "c.yaml", [f"compression={text}"])
