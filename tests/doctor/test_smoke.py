"""`moejax doctor --smoke` on simulated devices: what holds, and what does not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from moejax.doctor import machine
from moejax.doctor import smoke as checks
from moejax.doctor.command import main
from moejax.kernels.select import Choice
from tests.cases import small_config


def said(capsys):
    return " ".join(capsys.readouterr().out.split())


def run(found):
    return checks.smoke(Console(width=200), found)


def named(*words):
    """The checks whose names begin so, on two devices."""
    found = checks.smoke_checks(jax.local_devices()[:2])
    return [one for one in found if one.name.startswith(words)]


@pytest.mark.exhaustive
def test_everything_holds_on_two_devices(capsys):
    assert run(checks.smoke_checks(jax.local_devices()[:2])) == 0
    text = said(capsys)
    assert text.count("│ ok") == 11
    assert text.count("│ skipped") == 1
    assert "rows are permuted and quantised in turn" in text


def test_a_kernel_that_is_wrong_fails_alone_and_says_what_to_set(capsys, monkeypatch):
    right = checks.expert_mlp

    def wrong(*arrays, implementation, **options):
        y = right(*arrays, implementation=implementation, **options)
        return y * 1.01 if implementation == "blocked" else y

    monkeypatch.setattr(checks, "expert_mlp", wrong)
    assert run(named("experts", "attention", "all_to_all")) == 1
    text = said(capsys)
    assert text.count("│ failed") == 1
    assert text.count("│ ok") == 2, "those after it too"
    assert "experts: blocked failed. Set moe.implementation=blocked" in text


def test_a_gradient_that_is_wrong_fails_too(capsys, monkeypatch):
    right = checks.attention

    @jax.custom_vjp
    def doubled(x):
        return x

    doubled.defvjp(lambda x: (x, None), lambda _, gradient: (2 * gradient,))

    def wrong(*arrays, implementation, **options):
        y = right(*arrays, implementation=implementation, **options)
        return doubled(y) if implementation == "blocked" else y

    monkeypatch.setattr(checks, "attention", wrong)
    assert run(named("attention")) == 1


def test_a_collective_that_loses_a_device_fails(capsys, monkeypatch):
    def zeros(x, axes, **_):
        return jnp.zeros_like(x)

    monkeypatch.setattr(checks.wire, "all_to_all", zeros)
    assert run(named("all_to_all", "all_reduce")) == 1
    text = said(capsys)
    assert "all_to_all over 2 devices failed" in text
    assert text.count("│ ok") == 1


def test_one_device_exchanges_nothing(capsys):
    found = checks.smoke_checks(jax.local_devices()[:1])
    assert run([one for one in found if "over" in one.name]) == 0
    assert said(capsys).count("there is one device") == 5


@pytest.mark.parametrize("flags", [["--smoke"], []])
@pytest.mark.parametrize(
    "raised", [RuntimeError("Unable to initialize backend 'cuda'\nmore"), AssertionError()]
)
def test_no_devices_are_an_error_of_input(flags, raised, capsys, monkeypatch):
    def none():
        raise raised

    monkeypatch.setattr(machine.jax, "local_devices", none)
    assert main(flags) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "JAX_PLATFORMS" in error


def test_it_stands_alone(capsys):
    assert main(["--smoke", "--target", "h200"]) == 2
    assert "Leave out the others" in capsys.readouterr().err


def test_what_is_compared_of_rows_is_their_sum_over_peers_and_over_choices(monkeypatch):
    """Quantised numbers are off by one of 127 steps to the largest of their block."""
    compared = []
    monkeypatch.setattr(checks, "_assert_close", lambda have, want, share: compared.append(have))
    for check in (checks._check_quantize, checks._check_rows):
        check(Choice("reference", ""), small_config())
    summed, (rows_MD, y_ND) = compared
    peers = checks._draw(0, 4, 64, 4 * checks.BLOCK)
    step = float(jnp.abs(peers).max()) / 127
    np.testing.assert_allclose(summed, peers.sum(0), atol=4 * step)
    x_ND, weight_NK = checks._draw(0, 64, 8 * checks.BLOCK), jnp.abs(checks._draw(1, 64, 2))
    weight_N1 = weight_NK.sum(1, keepdims=True)
    step = float(jnp.abs(x_ND).max()) / 127
    np.testing.assert_allclose(y_ND, x_ND * weight_N1, atol=step * float(weight_N1.max()))
    assert rows_MD.shape == (128, 8 * checks.BLOCK)


def test_rows_without_a_kernel_are_skipped_and_say_why():
    with pytest.raises(checks.SkippedError, match="no kernel here"):
        checks._check_rows(Choice("separate", "no kernel here"), small_config())
