"""The command that says which implementation each operation takes."""

import importlib.metadata

import jax
import pytest

from moejax.plan.doctor import main

OLMOE = ["--config", "configs/olmoe_1b_7b.py"]


def test_it_says_what_is_installed_and_why_kernels_decline_here(capsys):
    assert main([]) == 0
    said = capsys.readouterr().out
    assert f"jax {importlib.metadata.version('jax')}" in said
    assert "platform cpu" in said
    assert "blocked" in said


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX 0.10 has no Mosaic GPU")
def test_it_answers_for_accelerators_that_are_not_here(capsys):
    assert main([*OLMOE, "--target", "h200"]) == 0
    said = capsys.readouterr().out
    assert "compute capability 9.0" in said
    assert "mosaic" in said
    assert "cudnn" in said


def test_what_the_config_asks_for_and_cannot_have_is_an_error(capsys):
    assert main([*OLMOE, "--config.kernels=required", "--target", "v6e"]) == 2
    assert "kernels" in capsys.readouterr().err
    assert main(["--config.kernels=required"]) == 2
