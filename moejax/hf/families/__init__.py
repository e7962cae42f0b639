"""Tables of the families of models that files can be read from and written to.

Read `parts` and `family` (`config.json` as settings), its parts `attention`, `blocks`, `experts`
and `rope`, `tensors` (rules that families share), then `tables`, Mixtral first, `biased`,
`latent` and `linear`.
"""

from collections.abc import Mapping
from typing import Any

from moejax.config.fields import short
from moejax.errors import InputError
from moejax.hf.families.biased import (
    AFMOE,
    DOTS1,
    ERNIE4_5_MOE,
    GLM4_MOE,
    HY_V3,
    MIMO_V2_FLASH,
    MINIMAX_M2,
    SOLAR_OPEN,
)
from moejax.hf.families.family import Family
from moejax.hf.families.latent import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    GLM4_MOE_LITE,
    GLM_MOE_DSA,
    MISTRAL4,
)
from moejax.hf.families.linear import KIMI_LINEAR, NEMOTRON_H, QWEN3_5_MOE, QWEN3_NEXT
from moejax.hf.families.tables import (
    FLEX_OLMO,
    GEMMA4,
    GPT_OSS,
    GRANITE_MOE,
    HUNYUAN_V1_MOE,
    LLAMA,
    MISTRAL,
    MIXTRAL,
    OLMOE,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
)

FAMILIES = (
    MIXTRAL,
    OLMOE,
    QWEN2_MOE,
    QWEN3_MOE,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GPT_OSS,
    GLM4_MOE,
    MINIMAX_M2,
    GLM4_MOE_LITE,
    DEEPSEEK_V32,
    GLM_MOE_DSA,
    SOLAR_OPEN,
    DOTS1,
    HY_V3,
    ERNIE4_5_MOE,
    HUNYUAN_V1_MOE,
    FLEX_OLMO,
    GRANITE_MOE,
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    QWEN3_NEXT,
    QWEN3_5_MOE,
    KIMI_LINEAR,
    GEMMA4,
    NEMOTRON_H,
    AFMOE,
    MIMO_V2_FLASH,
    MISTRAL4,
)


def family_of(config: Mapping[str, Any]) -> Family:
    """Returns the family of a `config.json`.

    Raises:
      InputError: if no family matches.
    """
    for family in FAMILIES:
        if family.matches(config):
            return family
    known = ", ".join(f"{family.name} ({family.architecture})" for family in FAMILIES)
    raise InputError(
        f"no family for `model_type` {short(config.get('model_type'))} with `architectures` "
        f"{short(config.get('architectures'))}. Known: {known}. Choose a model of one of them."
    )


def family_named(name: str) -> Family:
    """Returns the family of that name.

    Raises:
      InputError: lists the names.
    """
    for family in FAMILIES:
        if family.name == name:
            return family
    known = ", ".join(family.name for family in FAMILIES)
    raise InputError(f"no family {short(name)}. Known: {known}. Choose one of them.")
