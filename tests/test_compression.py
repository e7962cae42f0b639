import pytest

from moejax.compression import NO_COMPRESSION, CodecSpec, build_compression
from moejax.config import CompressionConfig
from moejax.errors import InputError
from moejax.settings import load_config


def build(**settings):
    return build_compression(CompressionConfig(**settings))


def test_a_preset_fills_what_is_not_set():
    assert build() == NO_COMPRESSION
    feedback = CodecSpec("int8", feedback=True)
    assert build(preset="hybrid").dense_gradient == feedback
    changed = build(preset="hybrid", expert_gradient="none", block=64)
    assert changed.expert_gradient is None
    assert changed.dense_gradient == CodecSpec("int8", feedback=True, block=64)


@pytest.mark.parametrize(
    "text", ["bfloat16", "int4+feedback", "e4m3+stochastic", "topk:0.01+feedback", "loco"]
)
def test_a_codec_is_written_as_it_is_read(text):
    assert str(build(dense_gradient=text).dense_gradient) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int3", "none or one of bfloat16, int8"),
        ("int4+feedbak", "no flag feedbak"),
        ("bfloat16+stochastic", "round at random"),
        ("loco+feedback", "feedback of its own"),
        ("int8:4", "takes no argument"),
        ("topk", "topk:0.01"),
        ("topk:2", "between 0 and 1"),
        ("topk:many", "between 0 and 1"),
    ],
)
def test_what_is_no_codec_is_refused_with_its_setting(text, message):
    with pytest.raises(InputError) as error:
        build(dense_gradient=text)
    assert str(error.value).startswith(f"`compression.dense_gradient` is `{text}`. ")
    assert message in str(error.value)


def test_the_group_may_be_named_by_its_preset(tmp_path):
    (tmp_path / "c.yaml").write_text("compression: strong\n")
    assert load_config(tmp_path / "c.yaml").compression.preset == "strong"
    changed = load_config(tmp_path / "c.yaml", ["compression=hybrid"])
    assert changed.compression.preset == "hybrid"
