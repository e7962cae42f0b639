"""The reader of compiled programs, on programs short enough to read along."""

import textwrap

import pytest

from moejax.aot.compiled import CompiledText
from moejax.aot.hlo import replica_groups

MESH = {"replica": 1, "fsdp": 2, "expert": 2, "tensor": 2}
NAMED = "mesh['replica'=1,'fsdp'=2,'expert'=2,'tensor'=2]"
GROUPS = "replica_groups=[4,2]<=[2,2,2]T(0,2,1)"  # along expert
PRODUCT = '%product = (f32[8,8], s8[64]) custom-call(%x, %x), custom_call_target="__cublas$gemm"'


def read(*entry, computations="", axes=MESH):
    """A program of these instructions."""
    head = "HloModule step, is_scheduled=true\n"
    lines = "\n".join(f"  {line}" for line in entry)
    body = f"ENTRY %main (x: f32[8,8]) -> f32[8,8] {{\n  %x = f32[8,8] parameter(0)\n{lines}\n}}\n"
    return CompiledText(head + textwrap.dedent(computations) + body, axes)


def start(name, operand="%x"):
    return (
        f"%{name} = ((bf16[2,4]{{1,0}}), bf16[2,4]{{1,0}}) all-to-all-start({operand}), "
        f'channel_id=1, {GROUPS}, dimensions={{0}}, metadata={{op_name="jit(step)/all_to_all"}}'
    )


def done(name, of):
    return f"%{name} = bf16[2,4]{{1,0}} all-to-all-done(%{of})"


def letters(text):
    return [(one.calls, one.letters) for one in text.schedules()]


def test_an_exchange_hides_behind_the_product_between_its_start_and_its_done():
    text = read(start("s0"), start("s1"), PRODUCT, done("d0", "s0"), done("d1", "s1"))
    assert letters(text) == [(1, "SSGDD")]
    assert [one.hides for one in text.exchanges()] == [True, True]


def test_what_is_in_flight_at_the_same_time_is_known():
    reduction = f"%r = f32[8,8] all-reduce(%x), channel_id=3, {GROUPS}, to_apply=%add"
    text = read(start("s0"), reduction, start("s1"), done("d0", "s0"), PRODUCT, done("d1", "s1"))
    assert [(one.launch, one.beside) for one in text.exchanges()] == [
        ("s0", ("s1",)),
        ("r", ("s0",)),
        ("s1", ("s0",)),
    ]
    text = read(start("s0"), done("d0", "s0"), reduction, start("s1"), done("d1", "s1"))
    assert [one.beside for one in text.exchanges()] == [(), (), ()]


LOOP = """
%body (p: f32[8,8]) -> f32[8,8] {{
  %p = f32[8,8] parameter(0)
  {0}
}}
%condition (p: f32[8,8]) -> pred[] {{
  ROOT %less = pred[] constant(true)
}}
"""
WHILE = "%w = f32[8,8] while(%x), condition=%condition, body=%body"


def test_what_is_in_flight_around_a_loop_is_beside_what_travels_inside():
    around = f"%r = f32[8,8] all-reduce-start(%x), channel_id=3, {GROUPS}, to_apply=%add"
    inside = f"%a = f32[8,8] all-to-all(%p), channel_id=1, {GROUPS}"
    text = read(
        around, WHILE, "%d = f32[8,8] all-reduce-done(%r)", computations=LOOP.format(inside)
    )
    assert {one.launch: one.beside for one in text.exchanges()} == {"r": ("a",), "a": ()}
    inside = f"%r = f32[8,8] all-reduce(%p), channel_id=3, {GROUPS}, to_apply=%add"
    text = read(start("s0"), WHILE, done("d0", "s0"), computations=LOOP.format(inside))
    assert {one.launch: one.beside for one in text.exchanges()} == {"s0": (), "r": ("s0",)}


def test_an_exchange_does_not_hide_behind_a_product_outside():
    text = read(PRODUCT, start("s0"), done("d0", "s0"))
    assert letters(text) == [(1, "GSD")]
    (one,) = text.exchanges()
    assert one.asynchronous
    assert not one.hides


def test_an_exchange_without_a_start_is_waited_for():
    text = read(f"%a = bf16[2,4]{{1,0}} all-to-all(%x), channel_id=1, {GROUPS}", PRODUCT)
    assert letters(text) == [(1, "AG")]
    (one,) = text.exchanges()
    assert (one.kind, one.axes, one.dtype, one.bytes) == ("all_to_all", ("expert",), "bfloat16", 16)
    assert not one.asynchronous


def test_instructions_of_a_loop_count_as_often_as_it_runs():
    computations = f"""\
        %body (p: f32[8,8]) -> f32[8,8] {{
          {start("s0", "%p")}
          {done("d0", "s0")}
        }}
        """
    trips = 'backend_config={"known_trip_count":{"n":"5"}}'
    loop = f"%w = f32[8,8] while(%x), condition=%c, body=%body, {trips}"
    text = read(loop, computations=computations)
    assert [one.calls for one in text.exchanges()] == [5]
    assert letters(text) == [(5, "SD")]


def test_of_a_conditional_the_first_branch_is_read_and_any_branch_may_multiply():
    computations = f"""\
        %usual (p: f32[8,8]) -> f32[8,8] {{
          {start("s0", "%p")}
          {done("d0", "s0")}
        }}
        %rare (p: f32[8,8]) -> f32[8,8] {{
          {start("s1", "%p")}
          {done("d1", "s1")}
          {PRODUCT.replace("%x", "%p")}
        }}
        """
    choice = "%c = f32[8,8] conditional(%i, %x, %x), branch_computations={%usual, %rare}"
    text = read(start("s2"), choice, done("d2", "s2"), computations=computations)
    assert letters(text) == [(1, "SD"), (1, "SCD")]
    assert sum(one.calls for one in text.exchanges()) == 2


@pytest.mark.parametrize("wrapped", ["fusion", "async"])
def test_a_collective_inside_a_fusion_or_an_asynchronous_call_is_found(wrapped):
    computations = f"""\
        %inside (p: f32[8,8]) -> f32[4,8] {{
          %p = f32[8,8] parameter(0)
          ROOT %r = f32[4,8]{{1,0}} reduce-scatter(%p), channel_id=1, {GROUPS}, to_apply=%add
        }}
        """
    begin = f"%s = ((f32[8,8]), f32[4,8]) {wrapped}-start(%x), calls=%inside"
    middle = "%u = ((f32[8,8]), f32[4,8]) async-update(%s)"
    end = f"%d = f32[4,8] {wrapped}-done(%u)"
    text = read(begin, middle, PRODUCT, end, computations=computations)
    assert letters(text) == [(1, "sGd")]
    (one,) = text.exchanges()
    assert (one.kind, one.bytes, one.hides) == ("reduce_scatter", 8 * 8 * 4, True)


@pytest.mark.parametrize(
    ("sliced", "kind", "size"),
    [("%r", "reduce_scatter", 8 * 8 * 4), ("%p", "all_reduce", 8 * 8 * 4)],
)
def test_a_fusion_of_a_reduction_and_its_slice_scatters(sliced, kind, size):
    computations = f"""\
        %all-reduce-scatter (p: f32[8,8]) -> f32[4,8] {{
          %p = f32[8,8] parameter(0)
          %r = f32[8,8]{{1,0}} all-reduce(%p), channel_id=1, {GROUPS}, to_apply=%add
          %z = s32[] constant(0)
          ROOT %d = f32[4,8] dynamic-slice({sliced}, %z, %z), dynamic_slice_sizes={{4,8}}
        }}
        """
    line = "%f = f32[4,8] fusion(%x), kind=kCustom, calls=%all-reduce-scatter"
    (one,) = read(line, computations=computations).exchanges()
    assert (one.kind, one.axes, one.bytes) == (kind, ("expert",), size)


def test_arrays_that_share_a_launch_are_counted_one_by_one():
    joined = f"%a = (f32[4]{{0}}, /*index=1*/s32[2]{{0}}) all-reduce(%x, %y), {GROUPS}"
    began = f"%b = ((f32[4]{{0}}), f32[4]{{0}}) all-reduce-start(%x), {GROUPS}"
    older = f"%c = f32[4]{{0}} all-reduce-start(%x), {GROUPS}"
    for line, wanted in ((joined, [16, 8]), (began, [16]), (older, [16])):
        assert [one.bytes for one in read(line).exchanges()] == wanted


def test_the_backward_pass_is_told_by_its_names():
    backward = start("s0").replace("jit(step)", "jit(step)/transpose(jvp(layer))")
    (one,) = read(backward, done("d0", "s0")).exchanges()
    assert one.backward


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("replica_groups=[8,1]<=[8]", ()),
        ("replica_groups=[4,2]<=[8]", ("tensor",)),
        ("replica_groups={{0,2},{1,3},{4,6},{5,7}}", ("expert",)),
        ("replica_groups=[2,4]<=[8]", ("expert", "tensor")),
        ("replica_groups=[2,4]<=[2,2,2]T(1,0,2)", ("fsdp", "tensor")),
        ("replica_groups=[1,8]<=[8]", ("fsdp", "expert", "tensor")),
        ("replica_groups={{0,7},{1,2},{3,4},{5,6}}", ("?",)),
        (f"replica_groups={NAMED} {{'replica','fsdp'}}", ("fsdp",)),
    ],
)
def test_groups_of_devices_are_named_by_their_axes(groups, axes):
    (one,) = read(f"%a = f32[8,8] all-reduce(%x), channel_id=1, {groups}").exchanges()
    assert one.axes == axes


def test_pairs_join_to_groups():
    pairs = "source_target_pairs={{0,1},{1,0},{2,3},{3,2}}"
    assert replica_groups(pairs, 4) == {frozenset({0, 1}), frozenset({2, 3})}
