"""The command that says which implementation each operation takes."""

import importlib.metadata

import jax
import pytest

from moejax.doctor.command import main

OLMOE = ["--config", "configs/olmoe_1b_7b.py"]


def test_it_says_what_is_installed_and_why_kernels_decline_here(capsys):
    assert main([]) == 0
    said = capsys.readouterr().out
    assert f"jax {importlib.metadata.version('jax')}" in said
    assert "platform cpu" in said
    assert "blocked" in said
    assert "default model in float32" in said


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX 0.10 has no Mosaic GPU")
def test_it_answers_for_accelerators_that_are_not_here(capsys):
    assert main([*OLMOE, "--target", "h200"]) == 0
    said = capsys.readouterr().out
    assert "compute capability 9.0" in said
    assert "mosaic" in said
    assert "cudnn" in said


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX 0.10 has no Mosaic GPU")
def test_without_a_config_it_answers_for_the_dtype_that_accelerators_train_in(capsys):
    assert main(["--target", "h200"]) == 0
    said = capsys.readouterr().out
    assert "cudnn" in said
    assert "mosaic" in said
    assert "float32" not in said
    assert "no config: for the default model in bfloat16" in said


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX 0.10 has no Mosaic GPU")
def test_it_says_what_the_config_names(capsys):
    words = [*OLMOE, "--config.moe.implementation=mosaic_e4m3", "--target"]
    assert main([*words, "h200"]) == 0
    assert "named in moe.implementation" in " ".join(capsys.readouterr().out.split())
    assert main([*words, "v6e"]) == 2
    found = capsys.readouterr()
    assert "megablox" in found.out, "what it would take instead"
    assert "mosaic_e4m3, which declines: it is for GPUs" in found.err


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX 0.10 has no Mosaic GPU")
def test_it_says_what_quantises_rows_of_tokens_as_they_move(capsys):
    hybrid = [*OLMOE, "--config.compression=hybrid"]
    assert main([*hybrid, "--target", "h200"]) == 0
    said = capsys.readouterr().out
    assert "quantized_rows" in said
    assert "separate" not in said
    assert main([*hybrid, "--config.model.width=2880", "--target", "h200"]) == 0
    said = capsys.readouterr().out
    assert "separate" in said
    assert "rows of 23" in said


def test_what_the_config_asks_for_and_cannot_have_is_an_error(capsys):
    odd = ["--config.kernels=required", "--config.model.head_width=36"]
    assert main([*OLMOE, *odd, "--target", "v6e"]) == 2
    assert "kernels" in capsys.readouterr().err
    assert main(["--config.kernels=required"]) == 2
