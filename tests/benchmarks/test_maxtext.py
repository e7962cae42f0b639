"""What the reader of MaxText's programs adds to our own."""

import textwrap

import pytest

from benchmarks.maxtext.read import name_functions, read_step

FACTS = {"seconds": 1.0, "argument_bytes": 1, "temporary_bytes": 1, "peak_bytes": 1}
FACTS["mesh"] = {"expert": 2}
PROGRAM = textwrap.dedent(
    """\
    HloModule step, is_scheduled=true

    FileNames
    1 "maxtext/layers.py"

    FunctionNames
    1 "NNXDecoder.apply_output_head"
    2 "DenseGeneral.__call__"

    FileLocations
    1 {file_name_id=1 function_name_id=1 line=1 end_line=1 column=1 end_column=1}
    2 {file_name_id=1 function_name_id=2 line=2 end_line=2 column=2 end_column=2}

    StackFrames
    1 {file_location_id=1 parent_frame_id=1}
    2 {file_location_id=2 parent_frame_id=2}


    ENTRY %main (x: bf16[8,8]) -> bf16[16,8] {
      %x = bf16[8,8] parameter(0)
      %d = bf16[8,8] dot(%x, %x), lhs_contracting_dims={1}, metadata={op_name="jit(s)/dot" stack_frame_id=2}
      %o = bf16[16,8] copy(%d)
      %r = bf16[16,8] ragged-all-to-all(%d, %o, %x, %x, %x, %x), replica_groups={{0,1}}
    }
    """  # noqa: E501
)


def read(text):
    return read_step(text, FACTS, filled=0.5, row_bytes=8 * 8 * 2, model_flops=1024.0)


def test_an_operation_is_named_by_the_functions_that_made_it():
    named = 'op_name="jit(s)/dot DenseGeneral.__call__ < NNXDecoder.apply_output_head"'
    assert named in name_functions(PROGRAM)
    assert read(PROGRAM).executed() == pytest.approx({"logits": 1.0, "all": 1.0})


def test_a_ragged_exchange_counts_rows_and_not_its_buffer():
    sent = read(PROGRAM).wire()["ragged_all_to_all", "expert"][0]
    assert sent == 8 * 8 * 2 / 2
