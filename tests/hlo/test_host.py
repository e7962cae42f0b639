"""Arrays in the hosts' memory, in steps compiled for described H200s.

Three layers of OLMoE at their real sizes: loops remain loops, of which XLA takes the last trip out.
"""

import jax
import pytest

from moejax.aot.compiled import CompiledText
from moejax.plan.price.candidate import trace_config
from moejax.runtime.patches import described_gpu
from moejax.serve.programs import build_programs, no_tokens
from tests.hlo.described import OPTIMIZE, compiled_step, described_step

pytestmark = [pytest.mark.aot, pytest.mark.usefixtures("compiled_anew")]

MODEL = ("train.batch_sequences=16", "model.num_layers=3", "moe.implementation=blocked")
MODEL += ("route_chunks=1",)
EVERYTHING = ("memory.optimizer=host", "memory.experts=host", "memory.residuals=host")
EVERYTHING += ("model.remat=attention",)


def model(*settings):
    return "olmoe_1b_7b.py", 1, (*MODEL, *settings)


def numbers(tree, chosen):
    """Numbers of chosen arrays on one of eight devices, which share each of them."""
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    return sum(x.size // 8 for path, x in found if chosen(jax.tree_util.keystr(path), x))


def test_hosts_hold_the_state_once_and_copies_hide():
    train_step, step = (f(*model(*EVERYTHING)) for f in (described_step, compiled_step))
    params = train_step.abstract.params
    matrices = numbers(params, lambda name, x: x.ndim > 2 or "embedding" in name)
    experts = numbers(params, lambda name, x: "['moe']['w_in']" in name or "['w_out']" in name)
    # Two moments of every matrix, and the weights of the experts, in float32.
    assert step.host_argument_bytes == pytest.approx(4 * (2 * matrices + experts), rel=1e-3)
    assert step.host_argument_bytes == train_step.host_bytes()
    read = trace_config(train_step.cfg, "gpu")
    predicted = read.peak(read.schedule())
    assert predicted.host_arguments == step.host_argument_bytes
    assert predicted.host_bytes == pytest.approx(
        step.host_argument_bytes + step.host_temporary_bytes, rel=0.1
    )
    assert predicted.bytes == pytest.approx(step.peak_bytes, rel=0.1)
    # Each layer's experts come twice, for forward and backward, while products run.
    gate_and_up = 4 * 8 * 2048 * 2 * 1024  # bytes of 8 of 64 experts
    fetched = [one for one in step.copies if one.to_device and one.bytes == gate_and_up]
    assert sum(one.calls for one in fetched if one.hides) == 2 * 3
    assert step.hidden_copies(to_device=False) >= 0.35  # the rest: moments, in the update's loop


@pytest.mark.exhaustive
def test_a_device_has_as_much_less_as_its_moments_take():
    own, other = (compiled_step(*model(*more)) for more in ((), ("memory.optimizer=host",)))
    moved = own.argument_bytes - other.argument_bytes
    assert other.host_argument_bytes == moved > 0
    assert other.host_temporary_bytes == 0
    assert other.temporary_bytes - own.temporary_bytes < moved / 1000


@pytest.mark.exhaustive
def test_slots_of_stages_travel_while_products_run():
    stages = ("mesh.stage=2", "mesh.fsdp=1", "mesh.expert=8", "mesh.stage_keeps=residuals")
    stages += ("train.micro_batches=8", "train.batch_sequences=128", "model.num_layers=4")
    stages += ("model.remat=token_collectives", "moe.implementation=blocked", "route_chunks=1")
    stages += ("memory.residuals=host",)
    train_step, step = (f("olmoe_1b_7b.py", 2, stages) for f in (described_step, compiled_step))
    read = trace_config(train_step.cfg, "gpu")
    predicted = read.peak(read.schedule())
    assert predicted.bytes == pytest.approx(step.peak_bytes, rel=0.1)
    assert predicted.host_bytes == pytest.approx(step.host_temporary_bytes, rel=0.1)
    # Rows of experts of two layers and two sequences, with headroom: the largest of a slot.
    rows = 2 * 2 * 81_920 * 2048
    copies = [one for one in step.copies if one.bytes == rows]
    assert sum(one.calls for one in copies if one.to_device and one.hides) == 8
    assert sum(one.calls for one in copies if not one.to_device and one.hides) == 9
    assert sum(one.calls for one in copies) == 8 + 9


def test_decoding_fetches_experts_while_the_layer_before_computes():
    cfg = described_step(*model("memory.experts=host")).cfg
    mesh = described_step(*model("memory.experts=host")).mesh
    programs = build_programs(
        cfg, mesh, "gpu", slots=64, positions=512, allowed=cfg.model.vocab_size
    )
    tokens = no_tokens(programs, programs.slots, 1)
    with described_gpu(mesh.devices.flat[0]):
        call = programs.extend(every=True)
        lowered = call.lower(programs.single.abstract, tokens, jax.eval_shape(programs.empty_cache))
    compiled = lowered.compile(compiler_options=OPTIMIZE)
    memory = compiled.memory_analysis()
    gate_and_up, down = (2 * 8 * 2048 * width * 1024 for width in (2, 1))  # 8 of 64 experts
    assert memory.host_argument_size_in_bytes == 3 * (gate_and_up + down)
    assert memory.host_temp_size_in_bytes == 0
    copies = CompiledText(compiled.as_text(), dict(programs.train_step.layout.sizes)).copies()
    for size in (gate_and_up, down):
        fetched = [one for one in copies if one.to_device and one.bytes == size]
        assert sum(one.calls for one in fetched) == 3
        assert sum(one.calls for one in fetched if one.hides) >= 2
    # Never all layers' experts are on the device beside the largest of the gathered weights.
    table = 2 * cfg.model.vocab_size * cfg.model.width
    assert memory.temp_size_in_bytes < table + 3 * (gate_and_up + down)
