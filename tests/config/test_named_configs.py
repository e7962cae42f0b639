"""Configs that come with moejax have names."""

import pytest

from moejax.config.files import named_configs
from moejax.config.load import load_config
from moejax.errors import InputError


def test_a_name_is_the_file_of_that_name():
    known = named_configs()
    assert {"tiny", "olmoe_1b_7b", "deepseek_v3"} <= set(known)
    assert load_config("tiny") == load_config(known["tiny"])


def test_a_file_of_that_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").write_text("")
    with pytest.raises(InputError, match="no suffix"):
        load_config("tiny")


def test_a_name_that_is_not_there_is_refused_with_the_nearest():
    with pytest.raises(InputError, match="Did you mean olmoe_1b_7b"):
        load_config("olmoe_1b")
