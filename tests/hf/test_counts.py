"""Parameters of published models, counted from their `config.json`.

`tests/golden/published_counts.json` holds what transformers builds for the same configs on the meta
device (`tests/golden/count_published.py`); `tests/parity/test_counts.py` counts them again.

What `published.json` was compared with, because the files of the authors could not be reached:
- Mixtral-8x7B: the copy in NVIDIA/TensorRT-LLM, tests/unittest/_torch/modeling/
  test_modeling_mixtral.py; equal.
- DeepSeek-V2-Lite: the copy in kvcache-ai/ktransformers, KT-SFT/ktransformers/configs/model_config/
  config.json; equal but for entries of `auto_map`.
- Qwen3-30B-A3B, Qwen3-235B-A22B, DeepSeek-V3, Kimi-K2-Instruct, gpt-oss-20b and -120b: copies of
  whole files in public notes and scripts; equal but for entries of `auto_map`.
- OLMoE-1B-7B: a copy of a later checkpoint's file; equal but for dtype and version.
- GLM-4.5-Air: a print of the config as a trainer had read it; equal but for the version.
- MiniMax-M2: copies of the files of M2.5 (equal) and M2.7 (equal but for the longest context).
- Moonlight-16B-A3B-Instruct: a copy in a test, which is what stands there.
- Llama-3.1-8B: the copy in citsjtu2020/LLM-Prof, sglang/Model_Config.md; equal. Mistral-7B-v0.1,
  Qwen2.5-0.5B, Qwen3-0.6B: copies of whole files in public notes and scripts; equal.
- GLM-4.7-Flash, Hy3: copies of whole files in tests of public repositories; equal.
- DeepSeek-V3.2: the file of DeepSeek-V3 with the indexer's three keys; sizes are the defaults of
  transformers' `DeepseekV32Config`, and those of the authors' inference/config_671B_v3.2.json, as
  notes describe it. Other keys were compared with nothing.
- GLM-5: sizes and the base of rotary positions, from the defaults of transformers'
  `GlmMoeDsaConfig`, from a reader of it in a public repository that names the file, and from the
  table of the authors' report, which agree. Other keys are those of a copy of a later model's file.
- Solar-Open-100B, dots.llm1: the keys of such copies, which do not claim to be whole.
- Hunyuan-A13B, Granite-3.0-1B-A400M: sizes and factors alone, from tests of public repositories.
- FlexOlmo-7x7B-1T: sizes alone, from the defaults of transformers' config class.
- ERNIE-4.5-21B-A3B: sizes alone, from the defaults of transformers' config class, equal to those of
  public notes.
- GLM-4.5: sizes alone, from NVIDIA's page on Megatron Bridge. Qwen1.5-MoE-A2.7B: sizes alone, from
  the defaults of transformers' `Qwen2MoeConfig`. Qwen3-Next-80B-A3B: sizes alone, from the defaults
  of `Qwen3NextConfig`; base of the rotary positions and longest context were compared with nothing.
- Qwen3.5-35B-A3B, 397B-A17B: the keys of the text model that public notes and scripts name; of the
  second the heads of linear attention are not among them, and fit the parameters of its name.
- Kimi-Linear-48B-A3B: sizes and layers alone, from the defaults of transformers' `KimiLinearConfig`
  and from public notes, which agree but for the layers: those are of the notes. Ids of tokens, and
  the keys of the router other than its experts and its factor, are from memory.
- Gemma-4-26B-A4B: all sizes are from memory, but the number of layers and their pattern, which are
  defaults of transformers' `Gemma4TextConfig`, and 2 key and value heads without a window, which a
  comment there names. They make 25.2 billion parameters, 3.8 billion active, as published.
- Nemotron-3-Nano-30B-A3B: a copy of the whole file in a test of a public repository; equal.
- Nemotron-3-Super-120B-A12B: sizes and layers alone, from public scripts for Megatron-LM and notes,
  which agree; channels of a state, groups and positions of the convolution are those of Nano.
- Trinity-Mini: all is from memory; its 26.1 billion parameters are those of its name.
- MiMo-V2-Flash: sizes from the defaults of transformers' `MiMoV2FlashConfig`, which agree with
  public notes and scripts; those name its other keys, too, whose values are from memory. They make
  309 billion parameters, 15 billion active, as published.
- Mistral-Small-4-119B: sizes and positions from the defaults of transformers' `Mistral4Config`.
`tests/parity/test_counts.py` compares sizes with the defaults of transformers' config classes too.
"""

import json
import math
from functools import cache
from pathlib import Path

import jax
import pytest

from moejax.hf.families import family_of
from moejax.hf.families.family import from_settings
from moejax.hf.model import describe_anywhere
from moejax.model.count import Counts, count
from moejax.step.model import parameter_sizes

# Whole models are traced, whose layers have tests.
pytestmark = pytest.mark.usefixtures("unchecked_annotations")

TESTS = Path(__file__).parents[1]
PUBLISHED = json.loads((TESTS / "hf" / "published.json").read_text())
GOLDEN = json.loads((TESTS / "golden" / "published_counts.json").read_text())["counts"]


@cache
def counted(name: str, ahead: int = 0) -> tuple[Counts, int]:
    """The counts of a published model, and how many selection biases it has."""
    settings = family_of(PUBLISHED[name]).read(PUBLISHED[name])
    cfg = from_settings(settings | {"model.predict_ahead": ahead})
    model, params, router_bias = describe_anywhere(cfg)
    biases = sum(math.prod(bias.shape) for bias in jax.tree.leaves(router_bias))
    return count(cfg, parameter_sizes(model.dims, params)), biases


def test_every_published_model_is_counted():
    assert list(GOLDEN) == list(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_are_those_of_transformers(name):
    counts, _ = counted(name)
    assert (counts.total, counts.active) == (GOLDEN[name]["total"], GOLDEN[name]["active"])


AHEAD = [name for name, counts in GOLDEN.items() if "ahead_total" in counts]


@pytest.mark.parametrize("name", AHEAD)
def test_the_module_for_multi_token_prediction_has_the_size_of_transformers_own(name):
    """transformers keeps it beside the model, so its count of the model is without it."""
    (plain, _), (counts, _) = counted(name), counted(name, ahead=1)
    assert counts.total - plain.total == GOLDEN[name]["ahead_total"]
    assert counts.active - plain.active == GOLDEN[name]["ahead_active"]


def _qwen(D, heads, key_heads, experts, expert):
    """A block of 256 channels a head with an output gate, and a shared expert with a gate."""
    attention = (2 * heads + 2 * key_heads + heads) * 256 * D + 2 * 256
    return attention + experts * (D + 3 * D * expert) + 3 * D * expert + D


# Of modules that transformers leaves out: the block, without norms of D, by the published sizes.
BLOCKS = {
    "Qwen3-Next-80B-A3B": (2048, _qwen(2048, 16, 2, 512, 512)),
    "Qwen3.5-35B-A3B": (2048, _qwen(2048, 16, 2, 256, 512)),
    # Keys of 192 channels, values of 128, sinks.
    "MiMo-V2-Flash": (4096, (64 + 8) * (192 + 128) * 4096 + 64 + 3 * 4096 * 16384),
    # Experts of two matrices at a latent of 1024; a public listing of the tensors has the shapes.
    "Nemotron-3-Super-120B-A12B": (
        4096,
        (2 * 4096 + 2 * 256 + 512 + 2 * 1024 + 2 * 5376) * 4096 + 512 * 2 * 1024 * 2688,
    ),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_module_that_transformers_leaves_out_has_the_size_of_its_shapes(name):
    D, block = BLOCKS[name]
    (plain, _), (counts, _) = counted(name), counted(name, ahead=1)
    # The projection of two states, and five norms.
    assert counts.total - plain.total == 2 * D * D + 5 * D + block


# Numbers in all tensors of published files, from public listings of their names, shapes and dtypes;
# of them scales of quantised weights, rotary frequencies, and copies of embedding and head.
FILES = {
    "DeepSeek-V2-Lite": (15_706_484_224, 0),  # of -Chat
    # Of DeepSeek-R1, which has the shapes of V3; with layer 61, which predicts ahead.
    "DeepSeek-V3": (684_531_386_000, 41_540_496 + 2 * 129_280 * 7168),
    "Kimi-K2": (1_026_470_731_056, 62_495_192 + 61 * 56),
    "gpt-oss-20b": (20_914_757_184, 0),  # of a copy whose experts are not in 4-bit floats
    "MiniMax-M2": (228_703_644_928, 13_880_064),  # of M2.7; no layer that predicts ahead
}
WITH_BIASES = ("DeepSeek-V3", "Kimi-K2", "MiniMax-M2")


@pytest.mark.parametrize("name", FILES)
def test_counts_are_those_of_published_files(name):
    numbers, others = FILES[name]
    counts, biases = counted(name, ahead=1 if name == "DeepSeek-V3" else 0)
    held = biases if name in WITH_BIASES else 0
    assert counts.total + held == numbers - others


def test_deepseek_v3s_module_has_its_published_size():
    """11,610,068,224 with the selection biases of its router, without copies of both tables."""
    (plain, biases), (counts, more) = counted("DeepSeek-V3"), counted("DeepSeek-V3", ahead=1)
    assert (biases, more) == (14_848, 15_104)
    assert counts.total + more - plain.total - biases == 11_610_068_224
