"""Quantised weights are dequantised to the numbers that transformers computes with."""

import numpy as np
import pytest

from moejax.config.schema import MeshConfig
from tests.hf.golden import cases_of, load_model
from tests.hf.random_models import draw, write_folder
from tests.parity import ours

pytestmark = pytest.mark.parity

WIDTH, HIDDEN, EXPERTS, VOCABULARY = 64, 32, 5, 97
LOGITS = 1e-5  # of the largest


def packed(name, rows, columns):
    """Blocks of 4-bit floats and their exponents, [E, rows, columns]."""
    rng = np.random.default_rng(len(name))
    groups = (EXPERTS, rows, columns // 32)
    blocks = rng.integers(0, 256, (*groups, 16)).astype(np.uint8)
    scales = rng.integers(122, 126, groups).astype(np.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


def test_4_bit_experts_of_gpt_oss(tmp_path, theirs):
    case = cases_of("gpt_oss")["top 3"]
    changes = {"hidden_size": WIDTH, "intermediate_size": HIDDEN, "vocab_size": VOCABULARY}
    config = {**case["config"], **changes, "quantization_config": {"quant_method": "mxfp4"}}
    size = {20: WIDTH, 10: HIDDEN, 997: VOCABULARY}
    tensors = {}
    for name, shape in case["tensors"].items():
        if name.endswith("gate_up_proj"):
            tensors |= packed(name, 2 * HIDDEN, WIDTH)
        elif name.endswith("experts.down_proj"):
            tensors |= packed(name, WIDTH, HIDDEN)
        elif name.endswith("gate_up_proj_bias"):
            tensors[name] = draw(name, (EXPERTS, 2 * HIDDEN))
        else:
            tensors[name] = draw(name, tuple(size.get(n, n) for n in shape))
    write_folder(tmp_path / "model", config, tensors)
    token_BT = np.random.default_rng(0).integers(0, VOCABULARY, (2, 24), dtype=np.int32)
    wanted = theirs.logits(theirs.load(tmp_path / "model"), token_BT)
    model = ours.Ours("gpt_oss", *load_model(tmp_path / "model", MeshConfig(), (2, 24)))
    bound = LOGITS * np.abs(wanted).max()
    np.testing.assert_allclose(ours.logits(model, token_BT), wanted, rtol=0, atol=bound)
