"""What a device executes, counted in programs short enough to count along."""

import textwrap

import pytest

from moejax.aot.compiled import CompiledText
from moejax.aot.work import KernelReader, measure_work

MESH = {"fsdp": 2}


def read(*entry, computations=""):
    """A program of these instructions; x is f32[8,8], i is s32[]."""
    lines = "\n".join(f"  {line}" for line in entry)
    head = "  %x = f32[8,8] parameter(0)\n  %i = s32[] parameter(1)\n"
    body = f"ENTRY %main (x: f32[8,8], i: s32[]) -> f32[8,8] {{\n{head}{lines}\n}}\n"
    text = "HloModule step, is_scheduled=true\n" + textwrap.dedent(computations) + body
    return CompiledText(text, MESH)


def named(scopes):
    return f'metadata={{op_name="jit(step)/{scopes}"}}'


def flops_of(*entry, computations="", **options):
    return measure_work(read(*entry, computations=computations), **options).flops


def bytes_of(*entry, computations=""):
    return measure_work(read(*entry, computations=computations)).other_bytes


def test_a_product_has_two_flops_for_each_multiplication():
    operands = "%a = bf16[3,5] copy(%x)", "%b = bf16[5,7] copy(%x)"
    dot = "%d = f32[3,7] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    scope = named("attention/dot_general")
    assert flops_of(*operands, f"{dot}, {scope}") == {"projections": 2 * 3 * 5 * 7}
    config = '"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]'
    call = (
        '%d = (f32[3,7], s8[64]) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", '
        f'{named("loss/dot_general")}, backend_config={{"dot_dimension_numbers":{{{config}}}}}'
    )
    assert flops_of(*operands, call) == {"logits": 2 * 3 * 5 * 7}


def test_a_product_inside_a_fusion_counts_by_its_own_name():
    fused = f"""\
        %fused (p: f32[8,8], q: f32[8,8]) -> f32[8,8] {{
          %p = f32[8,8] parameter(0)
          %q = f32[8,8] parameter(1)
          %d = f32[8,8] dot(%p, %q), lhs_contracting_dims={{1}}, {named("router/dot")}
          ROOT %n = f32[8,8] negate(%d), {named("experts/neg")}
        }}
        """
    line = "%f = f32[8,8] fusion(%x, %x), kind=kCustom, calls=%fused"
    assert flops_of(line, computations=fused) == {"rest": 2 * 8**3}
    assert bytes_of(line, computations=fused) == 0, "the traffic of a product is not counted"


def attention(mask, name, more=""):
    shape = '"intermediate_tensor_shape":{"element_type":"BF16","dimensions":["2","4","8","8"]}'
    return (
        f"%a = (bf16[2,4,8,16], u8[0]) custom-call(%q), custom_call_target={name!r}, "
        f'backend_config={{"cudnn_fmha_backend_config":{{{shape},"mask_type":"{mask}"{more}}}}}'
    ).replace("'", '"')


@pytest.mark.parametrize(
    ("mask", "name", "more", "products", "pairs"),
    [
        ("NO_MASK", "__cudnn$fmhaScaleBiasSoftmax", "", 2, 64),
        ("CAUSAL", "__cudnn$fmhaSoftmax", "", 2, 36),
        ("CAUSAL", "__cudnn$fmhaSoftmax", ',"sliding_window_length":2', 2, 15),
        ("CAUSAL", "__cudnn$fmhaSoftmaxBackward", "", 5, 36),
    ],
)
def test_attention_counts_the_pairs_that_it_visits(mask, name, more, products, pairs):
    q = "%q = bf16[2,8,4,16] copy(%x)"
    found = flops_of(q, attention(mask, name, more))
    assert found == {"attention": products * 2 * 2 * 4 * 16 * pairs}


def grouped(result, operands):
    return f'%k = {result} custom-call({operands}), custom_call_target="mosaic_gpu_v2"'


@pytest.mark.parametrize(
    ("result", "operands"),
    [
        ("bf16[40,6]", "%s, %rows, %matrices"),
        ("(bf16[40,3], bf16[40,2,3])", "%s, %rows, %gates"),
        ("bf16[4,16,6]", "%s, %rows, %others"),  # outer products
        ("bf16[4,16,6]", "%s, %columns, %others"),
    ],
)
def test_products_of_groups_count_filled_rows_and_whole_buffers(result, operands):
    arrays = (
        "%s = s32[9] copy(%x)",
        "%rows = bf16[40,16] copy(%x)",
        "%others = bf16[40,6] copy(%x)",
        "%columns = bf16[16,40] copy(%x)",
    )
    arrays += ("%matrices = bf16[4,16,6] copy(%x)", "%gates = bf16[4,16,2,3] copy(%x)")
    work = measure_work(read(*arrays, grouped(result, operands)), filled=0.75)
    assert work.most_flops == {"experts": 2 * 40 * 16 * 6}
    assert work.flops == {"experts": 0.75 * 2 * 40 * 16 * 6}


def test_a_kernel_that_encodes_rows_is_no_product():
    rows = "%rows = bf16[40,16] copy(%x)"
    line = grouped("(u8[40,1,16], f32[40,1])", "%rows")
    assert flops_of(rows, line) == {}
    assert bytes_of(rows, line) == 40 * 16 * 2 + 8 * 8 * 4 + 40 * 16 * 2 + 40 * 16 + 40 * 4


def test_the_table_of_classes_is_the_callers():
    line = "%d = f32[8,8] dot(%x, %x), lhs_contracting_dims={1}, "
    classes = {"dispatch": "bsm,bec", "experts": "moe"}
    assert flops_of(line + named("moe/wi"), classes=classes) == {"experts": 2 * 8**3}
    assert flops_of(line + named("moe/bsm,bec->x"), classes=classes) == {"dispatch": 2 * 8**3}
    assert flops_of(line + named("head"), classes=classes) == {"rest": 2 * 8**3}


LOOP = """\
%body (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8] parameter(0)
  %first = f32[8,8] fusion(%p), kind=kLoop, calls=%fused
  ROOT %second = f32[8,8] copy(%first)
}
%fused (q: f32[8,8]) -> f32[8,8] {
  %q = f32[8,8] parameter(0)
  ROOT %n = f32[8,8] negate(%q)
}
"""


def test_kernels_of_a_loop_are_launched_once_an_iteration():
    trips = 'backend_config={"known_trip_count":{"n":"5"}}'
    loop = "%w = f32[8,8] while(%x), condition=%c, body=%body"
    work = measure_work(read(f"{loop}, {trips}", computations=LOOP))
    assert (work.launches, work.loops, work.iterations, work.uncounted) == (10, 1, 5, 0)
    assert work.other_bytes == 10 * 2 * 256
    work = measure_work(read(loop, computations=LOOP))
    assert (work.launches, work.loops, work.iterations, work.uncounted) == (2, 1, 1, 1)


def test_a_conditional_launches_its_first_branch_and_an_asynchronous_call_what_it_calls():
    choice = "%c = f32[8,8] conditional(%i, %x, %x), branch_computations={%body, %rare}"
    work = measure_work(read(choice, computations=LOOP))
    assert (work.launches, work.conditionals) == (2, 1)
    begin = "%s = ((f32[8,8]), f32[8,8]) async-start(%x), calls=%body"
    work = measure_work(read(begin, "%d = f32[8,8] async-done(%s)", computations=LOOP))
    assert (work.launches, work.conditionals) == (2, 0)


def test_values_that_are_only_named_launch_nothing_and_a_collective_once():
    lines = ("%t = (f32[8,8], s32[]) tuple(%x, %i)", "%g = f32[8,8] get-tuple-element(%t), index=0")
    lines += ("%b = f32[64] bitcast(%g)", "%k = s32[] constant(3)")
    assert measure_work(read(*lines)).launches == 0
    start = "%s = ((f32[8,8]), f32[16,8]) all-gather-start(%x), replica_groups=[1,2]<=[2]"
    (kernel,) = KernelReader(read(start, "%d = f32[16,8] all-gather-done(%s)")).kernels()
    assert (kernel.collective, kernel.bytes, kernel.calls) == (True, 0, 1)


def fused(*body, result="f32[8,8]", parameters=()):
    shapes = {"p": "f32[100,8]", "i": "s32[4]"} | dict(parameters)
    lines = [f"%{name} = {shape} parameter({n})" for n, (name, shape) in enumerate(shapes.items())]
    inside = "".join(f"  {line}\n" for line in (*lines, *body))
    text = f"%fused (p: f32[100,8]) -> {result} {{\n{inside}}}\n"
    return f"%f = {result} fusion(%x, %i), kind=kLoop, calls=%fused", text


@pytest.mark.parametrize(
    ("body", "result", "moved"),
    [
        # Read and written once.
        (["ROOT %n = f32[100,8] negate(%p)"], "f32[100,8]", 2 * 3200),
        (["%b = f32[8,100] transpose(%p)", "ROOT %r = f32[8] reduce(%b, %p)"], "f32[8]", 3200 + 32),
        # A slice or gather counts only the part that it touches: 4 rows, and 4 indices.
        (["ROOT %s = f32[4,8] slice(%p)"], "f32[4,8]", 2 * 128),
        (["%c = bf16[100,8] convert(%p)", "ROOT %g = bf16[4,8] gather(%c, %i)"], "bf16[4,8]", 208),
        (["%g = f32[4,8] gather(%p, %i)", "ROOT %n = f32[4,8] add(%g, %g)"], "f32[4,8]", 272),
        # Two parts of one array, and never more than all of it.
        (
            [
                "%s = f32[40,8] slice(%p)",
                "%t = f32[40,8] slice(%p)",
                "ROOT %n = f32[40,8] add(%s, %t)",
            ],
            "f32[40,8]",
            3 * 40 * 32,
        ),
        (["ROOT %c = f32[200,8] concatenate(%p, %p)"], "f32[200,8]", 3200 + 6400),
    ],
)
def test_a_kernel_touches_what_its_results_need(body, result, moved):
    line, text = fused(*body, result=result)
    assert bytes_of(line, computations=text) == moved


@pytest.mark.parametrize("view", [False, True])
def test_an_update_in_place_touches_the_update(view):
    body = ["%n = f32[2,8] negate(%u)", "%d = f32[100,8] dynamic-update-slice(%p, %n, %i)"]
    if view:
        body.append("ROOT %v = f32[10,10,8] bitcast(%d)")
    else:
        body[1] = f"ROOT {body[1]}"
    line, text = fused(*body, result="f32[10,10,8]", parameters={"u": "f32[2,8]"}.items())
    assert bytes_of(line, computations=text) == 2 * 64 + 4 * 4
    # Where the whole updated array is needed, it is read and written.
    body = [body[0], "%d = f32[100,8] dynamic-update-slice(%p, %n, %i)"]
    body.append("ROOT %a = f32[100,8] negate(%d)")
    line, text = fused(*body, result="f32[100,8]", parameters={"u": "f32[2,8]"}.items())
    assert bytes_of(line, computations=text) == 2 * 3200 + 64 + 4 * 4


def test_each_result_of_a_fused_kernel_is_written():
    body = ["%n = f32[100,8] negate(%p)", "%s = f32[2,8] slice(%p)"]
    body.append("ROOT %t = (f32[100,8], f32[2,8]) tuple(%n, %s)")
    line, text = fused(*body, result="(f32[100,8], f32[2,8])")
    assert bytes_of(line, computations=text) == 2 * 3200 + 64


def test_kernels_that_are_not_fused_follow_the_same_rules():
    sliced = "%s = f32[2,8] dynamic-slice(%x, %i, %i)"
    assert bytes_of(sliced) == 2 * 64 + 4
    update = "%u = f32[8,8] dynamic-update-slice(%x, %s, %i, %i)"
    assert bytes_of(sliced, update) == 2 * (2 * 64 + 4)
    assert bytes_of("%c = (f32[8,8], f32[8,8], u32[]) copy-start(%x)") == 2 * 256
