"""What TPUs multiply, counted in lines as XLA writes them for described v5p and v6e."""

import pytest

from moejax.aot.compiled import CompiledText
from moejax.aot.hlo import ArrayType, Instruction
from moejax.aot.products import product_flops
from moejax.aot.target import TARGETS, _topology
from moejax.aot.work import measure_work
from moejax.errors import InputError


def flops(line, *shapes):
    """FLOPs of an instruction with operands of these shapes, in bfloat16 or as (dtype, shape)."""
    named = [s if isinstance(s[0], str) else ("bf16", s) for s in shapes]
    op, result, rest = line
    return product_flops(Instruction("k", op, result, rest), [ArrayType(*one) for one in named])


@pytest.mark.parametrize(
    ("attributes", "result", "shapes", "wanted"),
    [
        ("dim_labels=bf_io->bf", "bf16[40,7]", [(40, 20), (20, 7)], 2 * 40 * 20 * 7),
        ("dim_labels=fb_io->bf", "f32[40,7]", [(20, 40), (20, 7)], 2 * 40 * 20 * 7),
        # Heads are places of the window, each of which one head of the result meets.
        (
            "window={size=16 pad=15_15 rhs_reversal=1}, dim_labels=bf0_0oi->b0f",
            "bf16[40,16,8]",
            [(40, 20, 1), (16, 8, 20)],
            2 * 40 * 20 * 16 * 8,
        ),
        # A batch of products: strides and holes leave each place one of its own.
        (
            "window={size=4 stride=3 pad=0_0 lhs_dilate=4}, dim_labels=0bf_0io->0bf",
            "bf16[4,40,7]",
            [(4, 40, 20), (4, 20, 7)],
            2 * 4 * 40 * 20 * 7,
        ),
        (
            "window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f",
            "bf16[2,5,5,7]",
            [(2, 5, 5, 6), (3, 3, 6, 7)],
            2 * 2 * 6 * 7 * 13 * 13,
        ),
    ],
)
def test_a_convolution_counts_what_meets(attributes, result, shapes, wanted):
    line = ("convolution", result, f"%a, %b), {attributes}")
    assert flops(line, *shapes) == (wanted, False)


def call(result, name, *, more=""):
    rest = f'%a), custom_call_target="tpu_custom_call", {more}metadata={{op_name="jit(f)/{name}"}}'
    return "custom-call", result, rest


def test_a_product_of_groups_counts_its_buffer():
    sizes = [("s32", (9,)), ("s32", (87,))]
    gmm = call("bf16[640,256]{1,0:T(8,128)(2,1)}", "experts/gmm/pallas_call")
    assert flops(gmm, *sizes, (640, 128), (8, 128, 256)) == (2 * 640 * 128 * 256, True)
    tgmm = call("bf16[8,128,256]{2,1,0}", "experts/tgmm/pallas_call")
    assert flops(tgmm, *sizes, (640, 128), (640, 256)) == (2 * 640 * 128 * 256, True)


def test_tiles_that_do_not_divide_are_multiplied_whole():
    tiles = 'frontend_attributes={ragged_dot_tiling="128,128,640"}, '
    ragged = call("bf16[640,1024]", "ragged-dot-none", more=tiles)
    wanted = 2 * 640 * 128 * 1024 * 1.25
    assert flops(ragged, (640, 128), (8, 128, 1024)) == (wanted, True)


@pytest.mark.parametrize(
    ("kernel", "results", "wanted"),
    [
        ("fwd", 2, 7000.0),
        ("dq", 1, 7000 * 160 / (160 + 192)),  # two products as wide as keys, one as values
        ("dkv", 2, 7000 * 192 / (160 + 192)),
        ("dkv", 3, 7000.0),  # one kernel for all gradients
    ],
)
def test_splash_attention_counts_what_its_pass_is_named_with(kernel, results, wanted):
    result = "(" + ", ".join(["bf16[6,4096,64]{2,1,0}"] * results) + ")"
    which = "forward" if kernel == "fwd" else "backward"
    line = call(result, f"jit(attention_{which}_7000)/splash_mha_{kernel}_segmented/pallas_call")
    qkv = (6, 4096, 64), (2, 4096, 64), (2, 4096, 32)
    assert flops(line, ("s8", (1, 8, 8)), *qkv) == (pytest.approx(wanted), False)


PROGRAM = """\
HloModule step, is_scheduled=true

%stays (p: (s32[], f32[64])) -> pred[] {
  %limit = s32[]{:T(128)} constant(5)
  %p = (s32[]{:T(128)}, f32[64]{0:T(128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %limit), direction=LT
}

%body (q: (s32[], f32[64])) -> (s32[], f32[64]) {
  %q = (s32[]{:T(128)}, f32[64]{0:T(128)}) parameter(0)
  %j = s32[]{:T(128)} get-tuple-element(%q), index=0
  %x = f32[64]{0:T(128)} get-tuple-element(%q), index=1
  %fast = f32[64]{0:T(128)S(1)} negate(%x)
  %slow = f32[64]{0:T(128)} negate(%fast)
  %back = (f32[64]{0:T(128)}, f32[64]{0:T(128)S(1)}, u32[]{:S(2)}) copy-start(%slow)
  %part = ((f32[64]{0:T(128)}), f32[8]{0:T(128)S(1)}, s32[]) slice-start(%slow), slice={[0:8]}
  %two = s32[]{:T(128)} constant(2)
  %next = s32[]{:T(128)} add(%j, %two)
  ROOT %t = (s32[]{:T(128)}, f32[64]{0:T(128)}) tuple(%next, %slow)
}

ENTRY %main (a: (s32[], f32[64])) -> (s32[], f32[64]) {
  %a = (s32[]{:T(128)}, f32[64]{0:T(128)}) parameter(0)
  ROOT %w = (s32[]{:T(128)}, f32[64]{0:T(128)}) while(%a), condition=%stays, body=%body
}
"""


def test_a_loop_is_counted_by_its_condition_and_memory_of_the_core_is_no_traffic():
    work = measure_work(CompiledText(PROGRAM, {"fsdp": 1}))
    assert (work.loops, work.iterations, work.uncounted) == (1, 3, 0)
    assert work.other_bytes == 3 * (3 * 64 * 4 + 8 * 4 + 12), (
        "a read, a write, a copy and a slice of it out of memory; the counter"
    )


def test_what_a_kernel_says_of_itself_on_lines_of_its_own_is_read():
    lines = r"""
ENTRY %main (q: bf16[6,4096,64]) -> bf16[6,4096,64] {
  %g = s8[1,8,8]{2,1,0} parameter(0)
  %q = bf16[6,4096,64]{2,1,0} parameter(1)
  ROOT %c = bf16[6,4096,64]{2,1,0} custom-call(%g, %q, %q, %q), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\"block_q\": 512, \"block_kv\": 512}"
}}, metadata={op_name="jit(f)/attention/jit(attention_forward_9)/splash_mha_fwd_no_residuals/pallas_call"}
}
"""  # noqa: E501
    work = measure_work(CompiledText("HloModule step\n" + lines, {"fsdp": 1}))
    assert work.flops == {"attention": 9}


def test_nodes_make_whole_slices():
    with pytest.raises(InputError, match="3 nodes are no whole slices of v6e:4x4"):
        _topology(TARGETS["v6e_16"], 3)
