import json

import pyarrow
import pytest
from pyarrow import parquet

from moejax.data.prepare.conversations import conversation_of, read_chat_rows
from moejax.data.prepare.rows import BadRowError, Row
from moejax.errors import InputError

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}


def nested(depth):
    """A list in a list, and so on."""
    return json.loads("[" * depth + "]" * depth)


def parse(row):
    raw = row if isinstance(row, bytes) else json.dumps(row).encode()
    return conversation_of(Row(raw, "x.jsonl, line 7"))


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"messages": [USER, ANSWER], "id": 3}, [USER, ANSWER]),
        ({"prompt": "q", "completion": "a"}, [USER, ANSWER]),
        ({"instruction": "q", "output": "a"}, [USER, ANSWER]),
        (
            {"instruction": "q", "input": "more", "output": "a"},
            [{"role": "user", "content": "q\n\nmore"}, ANSWER],
        ),
        (
            {"prompt": "q", "completion": "a", "system": "be brief"},
            [{"role": "system", "content": "be brief"}, USER, ANSWER],
        ),
        (
            {"messages": [{**USER, "content": [{"type": "text", "text": "q"}]}, ANSWER]},
            [USER, ANSWER],
        ),
        ({"messages": [USER, CALL]}, [USER, {"role": "assistant", "tool_calls": [{"name": "f"}]}]),
    ],
)
def test_three_forms_of_rows_become_messages(row, wanted):
    assert parse(row).messages == wanted


def called(arguments, **more):
    """A message that calls a tool."""
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", **more, **arguments}}]}


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        (
            called({"arguments": {"a": {"b": None, "c": [None, {"d": None}]}}}),
            {"a": {"c": [None, {}]}},
        ),
        (called({"arguments": '{"city":"Ulm","a":null}'}), {"city": "Ulm", "a": None}),
        (called({"arguments": None}), {}),
        (called({"arguments": " "}), {}),
        (called({"arguments": {"a": None}}, strict=None), {}),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{}"}]}, {}),
        ({"role": "assistant", "tool_calls": '[{"name": "f", "arguments": {"a": 1}}]'}, {"a": 1}),
        ({**ANSWER, "function_call": {"name": "f", "arguments": '{"a": 1}'}}, {"a": 1}),
    ],
)
def test_arguments_have_one_form(message, wanted):
    """An object, without what Parquet adds; a null in a text of JSON is the author's."""
    conversation = parse({"messages": [USER, message]})
    assert conversation.arguments() == [wanted]
    assert "strict" not in conversation.key()
    (text,) = conversation.with_arguments_as_text()[1:]
    assert json.dumps(json.dumps(wanted)) in json.dumps(text)
    assert conversation.arguments() == [wanted]  # the copy alone was changed


def test_nulls_in_tools_are_left_out_but_for_those_of_a_text():
    tool = {"name": "f", "parameters": {"a": {"type": "string"}, "b": None}, "strict": None}
    kept = {"name": "f", "parameters": {"a": {"type": "string"}}}
    assert parse({"messages": [USER, ANSWER], "tools": [tool]}).tools == [kept]
    assert parse({"messages": [USER, ANSWER], "tools": json.dumps([tool])}).tools == [tool]


@pytest.mark.parametrize(
    ("row", "wanted", "answers"),
    [
        ({"prompt": [USER], "completion": "a"}, [USER, ANSWER], [1]),
        ({"prompt": "q", "completion": [ANSWER]}, [USER, ANSWER], [1]),
        (
            {"prompt": [USER, ANSWER, USER], "completion": [ANSWER, USER, ANSWER]},
            [USER, ANSWER, USER, ANSWER, USER, ANSWER],
            [3, 5],
        ),
        (
            {"prompt": [{**USER, "name": None}], "completion": [ANSWER], "system": "s"},
            [{"role": "system", "content": "s"}, USER, ANSWER],
            [2],
        ),
    ],
)
def test_prompt_and_completion_may_be_lists_of_messages(row, wanted, answers):
    conversation = parse(row)
    assert conversation.messages == wanted
    assert conversation.answers() == answers
    assert conversation.has_given_answers() == (len(wanted) == 6)


def test_the_key_does_not_depend_on_the_form():
    rows = (
        {"messages": [USER, ANSWER]},
        {"prompt": "q", "completion": "a"},
        {"output": "a", "instruction": "q", "id": 8},
    )
    assert len({parse(row).key() for row in rows}) == 1
    assert parse({"messages": [USER, ANSWER], "tools": [1]}).key() != parse(rows[0]).key()


@pytest.mark.parametrize(
    ("tools", "wanted"),
    [([{"a": 1}], [{"a": 1}]), ('[{"a": 1}]', [{"a": 1}]), (None, None), ("", None), ([], None)],
)
def test_tools_are_a_list_or_its_json(tools, wanted):
    assert parse({"messages": [USER, ANSWER], "tools": tools}).tools == wanted


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (b"{", "not JSON"),
        (b'{"messages": "\xff"}', "not UTF-8"),
        ([], "it has list"),
        ({}, "it has no field"),
        ({"text": "a"}, "it has text. A conversation is messages, or prompt and completion"),
        ({"messages": "text"}, "messages is str"),
        ({"messages": []}, r"no assistant turn \(no message\)"),
        ({"messages": ["text"]}, "message 0 is str"),
        ({"messages": [USER, {"role": "assistant"}]}, r"message 1 \(assistant\) has content null"),
        ({"messages": [{**USER, "content": None}, ANSWER]}, r"message 0 \(user\) has content null"),
        ({"messages": [{**USER, "role": "gpt"}, ANSWER]}, "role 'gpt'"),
        ({"messages": [{**USER, "tool_calls": [1], "content": None}, ANSWER]}, "content null"),
        ({"messages": [{**USER, "content": [{"type": "image"}]}, ANSWER]}, "no texts"),
        ({"prompt": ["q"], "completion": "a"}, "no texts"),
        ({"messages": [USER, ANSWER], "tools": "{}"}, "tools is the JSON of dict"),
        (
            {"messages": [USER, called({"arguments": '{"a"'})]},
            "message 1, arguments of a call is not",
        ),
        ({"messages": [USER, called({"arguments": "[1]"})]}, "message 1.* the JSON of list"),
        ({"messages": [USER, called({"arguments": [1]})]}, "message 1, arguments of a call: list"),
        ({"messages": [USER, {**ANSWER, "tool_calls": "f()"}]}, "tool_calls is not JSON"),
        ({"messages": [USER, {**ANSWER, "x": nested(200)}]}, "nested more than 100 deep"),
        ({"messages": [USER, ANSWER], "tools": nested(200)}, "nested more than 100 deep"),
        ({"prompt": [USER, ANSWER], "completion": [USER]}, "no assistant turn"),
        ({"messages": [USER, ANSWER], "tools": {"a": 1}}, "tools is dict"),
    ],
)
def test_a_broken_row_is_named(row, said):
    with pytest.raises(BadRowError, match=said) as refused:
        parse(row)
    assert "x.jsonl, line 7" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_rows_of_jsonl_are_counted_with_blank_lines(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "q", "completion": "a"}\n\n{"messages": []}\n')
    rows = list(read_chat_rows([tmp_path / "a.jsonl"]))
    assert [row.source.rpartition(", ")[2] for row in rows] == ["line 1", "line 3"]


def test_rows_of_parquet_are_conversations_too(tmp_path):
    turns = [[USER, ANSWER], [USER, CALL], None]
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"messages": turns, "id": [1, 2, 3]}), path)
    rows = list(read_chat_rows([path]))
    assert [list(row.value()) for row in rows] == [["messages"]] * 3
    assert conversation_of(rows[0]).messages == [USER, ANSWER]
    assert conversation_of(rows[1]).messages[1]["tool_calls"] == [{"name": "f"}]
    with pytest.raises(BadRowError, match="row 2"):
        conversation_of(rows[2])
    parquet.write_table(pyarrow.table({"text": ["a"]}), path)
    with pytest.raises(InputError, match=r"no conversations.*columns text"):
        list(read_chat_rows([path]))


def test_other_files_are_refused(tmp_path):
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(InputError, match=r"a\.json ends in \.json.*jq"):
        list(read_chat_rows([tmp_path / "a.json"]))


def test_every_text_of_a_conversation_is_looked_at():
    messages = [{**USER, "content": "q"}, {**CALL, "tool_calls": [{"f": {"deep": ["down"]}}]}]
    conversation = conversation_of(Row({"messages": messages, "tools": [{"t": "u"}]}, ""))
    assert {"q", "deep", "down", "t", "u"} <= set(conversation.texts())
