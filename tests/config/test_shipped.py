"""The configs that are shipped are the published models."""

import json
from pathlib import Path

import pytest

from moejax.config.checks import check
from moejax.config.load import load_config
from moejax.hf.families import family_of
from moejax.hf.families.family import differences, from_settings

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
PUBLISHED = json.loads((ROOT / "tests" / "hf" / "published.json").read_text())
MODELS = {
    "deepseek_v2_lite": "DeepSeek-V2-Lite",
    "deepseek_v3": "DeepSeek-V3",
    "deepseek_v3_2": "DeepSeek-V3.2",
    "gemma_4_26b_a4b": "Gemma-4-26B-A4B",
    "glm_45_air": "GLM-4.5-Air",
    "glm_5": "GLM-5",
    "gpt_oss_120b": "gpt-oss-120b",
    "gpt_oss_20b": "gpt-oss-20b",
    "kimi_k2": "Kimi-K2",
    "kimi_linear_48b_a3b": "Kimi-Linear-48B-A3B",
    "minimax_m2": "MiniMax-M2",
    "mixtral_8x7b": "Mixtral-8x7B",
    "nemotron_3_nano_30b_a3b": "Nemotron-3-Nano-30B-A3B",
    "olmoe_1b_7b": "OLMoE-1B-7B",
    "qwen3_235b_a22b": "Qwen3-235B-A22B",
    "qwen3_30b_a3b": "Qwen3-30B-A3B",
    "qwen3_30b_a3b_1m": "Qwen3-30B-A3B",
    "qwen3_5_35b_a3b": "Qwen3.5-35B-A3B",
    "qwen3_5_397b_a17b": "Qwen3.5-397B-A17B",
}


def test_every_config_but_tiny_is_of_a_published_model():
    assert {path.stem for path in CONFIGS.glob("*.py")} == {*MODELS, "tiny"}


@pytest.mark.parametrize(("config", "name"), MODELS.items())
def test_a_config_has_the_model_of_the_published_file(config, name):
    cfg = load_config(CONFIGS / f"{config}.py")
    check(cfg)
    published = from_settings(family_of(PUBLISHED[name]).read(PUBLISHED[name]))
    assert differences(published, cfg) == []
    ours, theirs = cfg.moe.router, published.moe.router
    assert ours.balance_loss == pytest.approx(theirs.balance_loss)
    assert ours.balance_over == theirs.balance_over


def test_the_table_of_models_has_the_counts_of_transformers():
    golden = json.loads((ROOT / "tests" / "golden" / "published_counts.json").read_text())["counts"]
    text = (ROOT / "docs" / "models.md").read_text()
    lines = [line for line in text.splitlines() if "`configs/" in line]
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]
    listed = {row[0]: row[2:] for row in rows if len(row) == 4}
    assert listed.keys() == {f"configs/{name}.py" for name in (*MODELS, "tiny")}
    for config, name in MODELS.items():
        counts = [f"{golden[name][kind]:,}" for kind in ("total", "active")]
        assert listed[f"configs/{config}.py"] == counts
