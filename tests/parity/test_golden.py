"""The golden files are what the installed transformers computes."""

import json

import numpy as np
import pytest

from tests.hf.config_keys import GOLDEN, released
from tests.hf.golden import all_cases, cases_of

ALWAYS = ("mixtral: even, llama3 positions", "deepseek_v3: even, groups, yarn")
DEFAULTS = json.loads(GOLDEN.read_text())["cases"]
EXACT = ("name", "tensors", "tokens", "positions", "ids", "choices", "greedy")

pytestmark = pytest.mark.parity


def params() -> list:
    """All golden models; few by default."""
    return [
        pytest.param(*param.values, id=param.id)
        if param.id in ALWAYS
        else pytest.param(*param.values, id=param.id, marks=pytest.mark.exhaustive)
        for param in all_cases()
    ]


@pytest.mark.parametrize(("family", "name"), params())
def test_the_golden_file_is_what_transformers_computes(make_models, family, name):
    wanted = cases_of(family)[name]
    found = make_models.run_case(family, name, make_models.CASES[family][name])
    assert {key: found[key] for key in EXACT} == {key: wanted[key] for key in EXACT}
    assert found["config"] == wanted["config"]
    bound = 1e-6 * wanted["largest"]  # another build of torch may sum in another order
    for key in ("logits", "logsumexp", "largest", "loss"):
        np.testing.assert_allclose(found[key], wanted[key], rtol=0, atol=bound, err_msg=key)
    assert set(found["gradients"]) == set(wanted["gradients"])
    rounding = np.finfo(np.float32).eps * max(norm for norm, _ in wanted["gradients"].values())
    for tensor, (norm, projection) in wanted["gradients"].items():
        bound = 1e-5 * norm + rounding
        got = found["gradients"][tensor]
        np.testing.assert_allclose(got, [norm, projection], rtol=0, atol=bound, err_msg=tensor)


@pytest.mark.parametrize(
    "name",
    [
        name if name in ALWAYS else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in DEFAULTS
    ],
)
def test_missing_keys_and_nulls_are_what_transformers_makes_of_them(config_defaults, name):
    family, golden = name.split(": ", 1)
    found = config_defaults.run_case(released(cases_of(family)[golden]["config"]))
    # As in the file: JSON has no tuples.
    assert json.loads(json.dumps(found)) == DEFAULTS[name]
