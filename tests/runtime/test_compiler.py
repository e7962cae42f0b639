import re
import warnings

import jax
import jax.numpy as jnp
import pytest

from moejax.runtime.compiler import compiler_options, known_options
from moejax.runtime.patches import described_gpu
from tests.cases import small_config, step_for

KNOWN = {"xla_cpu_enable_fast_math": "False"}


def test_a_known_option_is_kept_without_a_word():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert known_options(KNOWN, jax.devices()[0]) == KNOWN


def test_an_option_that_the_compiler_does_not_know_is_dropped_with_a_warning():
    asked = KNOWN | {"xla_gpu_of_another_release": 2}
    with pytest.warns(UserWarning, match="no compiler option xla_gpu_of_another_release"):
        kept = known_options(asked, jax.devices()[0])
    assert kept == KNOWN
    assert jax.jit(lambda x: x + 1, compiler_options=kept)(jnp.int32(1)) == 2


def test_a_value_that_the_compiler_refuses_is_an_error():
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_cpu_enable_fast_math"):
        known_options({"xla_cpu_enable_fast_math": "perhaps"}, jax.devices()[0])


@pytest.mark.parametrize(
    ("hops", "more", "slots"),
    [
        # Each hop may dispatch and combine at once, and a reduction runs beside them.
        (1, {}, 3),
        (2, {}, 5),
        # A reduction of three hops has a second slot.
        (1, {"reduction_hops": 0}, 3),
        (1, {"reduction_hops": 2}, 3),
        (1, {"reduction_hops": 3}, 4),
        # Where nothing is exchanged, a gather and a reduction.
        (0, {}, 2),
        (0, {"reduction_hops": 3}, 2),
        # Transfers between stages have a slot beside the loops over layers.
        (0, {"stages": 2}, 2),
        (1, {"stages": 2}, 4),
        (2, {"stages": 2}, 6),
        # Keys along a ring, and the sums of their gradients, each by two permutes.
        (0, {"ring": True}, 4),
        (2, {"ring": True}, 5),
    ],
)
def test_collectives_that_may_be_under_way_on_gpus(hops, more, slots):
    assert list(compiler_options("gpu", hops=hops, **more).values()) == [slots]


def test_without_hops_only_what_moves_weights_is_asked_of_tpus():
    offload = "xla_tpu_enable_sparse_core_collective_offload"
    weights = {f"{offload}_all_gather": "true", f"{offload}_reduce_scatter": "true"}
    assert compiler_options("tpu", hops=0) == weights
    assert compiler_options("tpu", hops=1) == weights | {"xla_tpu_enable_async_all_to_all": "true"}


@pytest.mark.slow
def test_a_step_on_cpu_copies_no_moments():
    step = step_for(small_config((1, 1, 1, 1)))
    text = step.step.lower(step.abstract, step.abstract_batch()).compile().as_text()
    assert "%state_optimizer" in text
    assert not re.findall(r" copy\(%state_optimizer", text)


def test_cudnn_of_the_described_gpu_is_asked_for_and_the_installed_one_afterwards():
    import jax._src.cudnn.fused_attention_stablehlo as asked

    before = asked.check_cudnn_version, asked.check_compute_capability
    with described_gpu():
        assert asked.check_cudnn_version() == 9 * 10_000 + 10 * 100, "9.10.0"
        assert asked.check_compute_capability("9.0") is True
    assert (asked.check_cudnn_version, asked.check_compute_capability) == before
