"""`moejax prepare --chat`, from rows to token files with marks."""

import dataclasses
import json
import re

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from moejax.config.schema import DataConfig
from moejax.data.marks import marks_of
from moejax.data.prepare import command as prepare
from moejax.data.prepare.control_tokens import ControlEncoder
from moejax.data.prepare.flags import SUFFIXES
from moejax.data.sidecar import ChatForm, read_sidecar
from moejax.data.sources import describe_tokens
from moejax.data.tokenizer import FileTokenizer, load_library
from tests.data.chats import BYTES, CHATML, INST, write_model
from tests.data.token_files import read


def rows(count):
    return [
        {"prompt": f"question {number}", "completion": f"answer {number} " * (number % 5 + 1)}
        for number in range(count)
    ]


def write_rows(folder, rows, name="chat.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(*arguments):
    return prepare.main([str(argument) for argument in arguments])


@pytest.fixture
def command(tmp_path):
    """A command for bytes, whose template is a file."""
    (tmp_path / "bytes.jinja").write_text(BYTES)
    path = write_rows(tmp_path, rows(40))
    options = ("--chat", "--chat-template", tmp_path / "bytes.jinja", "--out", tmp_path / "out/x")
    return path, *options


def conversations(path):
    """(text, targets as text) of each conversation of a file of bytes."""
    source = read(path)
    stretch = source.stretch(0, source.num_tokens)
    found = []
    for part in np.split(np.arange(source.num_tokens), np.flatnonzero(stretch.begin_N)[1:]):
        whole, learned = stretch.token_N[part], stretch.token_N[part[stretch.target_N[part]]]
        found.append((text_of(whole), text_of(learned)))
    return found


def text_of(ids):
    return bytes(id for id in ids if id < 256).decode()


@pytest.mark.parametrize("format", SUFFIXES)
def test_rows_become_token_files_with_marks(tmp_path, command, format):
    assert run(*command, "--format", format, "--eval-fraction", "0.3") == 0
    found = {}
    for split in ("train", "eval"):
        path = tmp_path / f"out/x.{split}{SUFFIXES[format]}"
        assert marks_of(path).is_file()
        assert run("--verify", path) == 0
        found[split] = conversations(path)
    wanted = [(f"u:{row['prompt']}a:{row['completion']}", row["completion"]) for row in rows(40)]
    assert found["train"] == [pair for pair in wanted if pair not in found["eval"]]
    assert found["eval"] == [pair for pair in wanted if pair not in found["train"]]
    assert min(map(len, found.values())) > 0


def test_a_model_folder_is_enough(tmp_path, capsys):
    path = write_model(tmp_path / "model", template=CHATML)
    file = write_rows(tmp_path, rows(3))
    words = (file, "--chat", "--tokenizer", path, "--out", tmp_path / "x", "--eval-fraction", 0)
    assert run(*words) == 0
    said = capsys.readouterr().err
    assert re.search(r"3 documents, [\d,]+ tokens \([\d,]+ learned\)", said)
    assert "without a control token" not in said
    source = read(tmp_path / "x.train.bin", model_vocab=300)
    stretch = source.stretch(0, source.num_tokens)
    end = ControlEncoder(path).encode("<|im_end|>").token_N[0]
    assert np.sum(stretch.token_N[stretch.target_N] == end) == 3
    assert np.sum(stretch.token_N == end) == 6
    assert (tmp_path / "x.tokenizer.json").is_file()


def test_a_conversation_is_held_out_by_its_messages_alone(tmp_path, command):
    (tmp_path / "other.jinja").write_text("now: " + BYTES)
    splits = []
    for name in ("bytes", "other"):
        options = ("--chat", "--chat-template", tmp_path / f"{name}.jinja", "--eval-fraction", 0.3)
        assert run(command[0], *options, "--out", tmp_path / name) == 0
        splits.append([learned for _, learned in conversations(tmp_path / f"{name}.eval.bin")])
    assert splits[0] == splits[1]


BROKEN = [
    {"messages": [{"role": "user", "content": None}]},
    {"prompt": "no answer"},
    {"messages": [{"role": "assistant", "content": "<|endoftext|>"}]},
]


def test_a_broken_row_ends_the_command_and_leaves_no_file(tmp_path, command, capsys):
    write_rows(tmp_path, [*rows(2), BROKEN[2], *rows(2)])
    assert run(*command, "--eval-fraction", 0) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert lines[-1].startswith("moejax: error: ")
    assert "chat.jsonl, line 3" in lines[-1]
    assert "--skip-bad" in lines[-1]
    assert not list((tmp_path / "out").glob("*"))


def test_broken_rows_can_be_left_out_and_are_counted(tmp_path, command, capsys):
    write_rows(tmp_path, [*BROKEN, *rows(2)])
    with command[0].open("ab") as file:
        file.write(b"{half a line\n")
    assert run(*command, "--eval-fraction", 0, "--skip-bad") == 0
    said = capsys.readouterr().err
    assert "left out: 4 broken rows. The first: row is broken." in said
    assert "chat.jsonl, line 1" in said
    assert len(conversations(tmp_path / "out/x.train.bin")) == 2
    write_rows(tmp_path, BROKEN)
    assert run(*command, "--eval-fraction", 0, "--skip-bad", "--overwrite") == 2
    assert "gave 0 documents and 3 broken rows" in capsys.readouterr().err


def test_rows_that_a_template_writes_otherwise_can_be_left_out(tmp_path, command, capsys):
    """It leaves out what came before the last question, so a row of two answers is no beginning."""
    template = "{% for m in messages[-2:] %}{{ m.content }}<|endoftext|>{% endfor %}"
    (tmp_path / "bytes.jinja").write_text(template)
    turns = [{"role": role, "content": role} for role in ("user", "assistant")]
    write_rows(tmp_path, [{"messages": turns}, {"messages": 2 * turns}])
    assert run(*command, "--eval-fraction", 0, "--skip-bad") == 0
    said = capsys.readouterr().err
    assert "left out: 1 broken row. The first: answers cannot be found." in said
    assert len(conversations(tmp_path / "out/x.train.bin")) == 1


def test_notes_tell_of_dates_and_of_turns_without_end(tmp_path, command, capsys):
    template = "{{ strftime_now('%Y-%m-%d') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    (tmp_path / "bytes.jinja").write_text(template)
    write_rows(tmp_path, rows(1))
    assert run(*command, "--eval-fraction", 0) == 0
    said = capsys.readouterr().err
    assert "writes today's date" in said
    assert "without a control token: 1" in said
    assert run(*command, "--eval-fraction", 0, "--overwrite", "--date", "2024-07-26") == 0
    assert "today" not in capsys.readouterr().err
    (found,) = conversations(tmp_path / "out/x.train.bin")
    assert found == ("2024-07-26question 0answer 0 ", "answer 0 ")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--answers", "last"), "`--answers` has no effect"),
        (("--date", "2024-01-01"), "`--date` has no effect"),
        (("--chat-template", "a"), "`--chat-template` has no effect"),
        (("--chat", "--text-field", "a"), "`--text-field` has no effect"),
        (("--chat",), "no chat template"),
        (("--chat", "--date", "today", "--chat-template", "a"), "`--date` is no day"),
        (("--chat", "--chat-template", "nowhere"), "no chat template. nowhere"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path, capsys, options, said):
    file = write_rows(tmp_path, rows(1))
    assert run(file, "--out", tmp_path / "x", *options) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.glob("x.*")) == []


@pytest.mark.parametrize("format", SUFFIXES)
def test_replacing_removes_all_files_of_the_earlier_run(tmp_path, command, format):
    """Otherwise text that is trained on now would still pass for held out."""
    assert run(*command, "--eval-fraction", "0.3", "--format", format) == 0
    assert len(list((tmp_path / "out").iterdir())) == 6
    text = tmp_path / "a.txt"
    text.write_text("text")
    assert run(text, "--out", tmp_path / "out/x", "--eval-fraction", 0, "--overwrite") == 0
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["x.train.bin", "x.train.bin.json"]


def test_arguments_of_calls_are_learned_as_they_were_given(tmp_path):
    """Arrow gives each call the arguments of all others, as null; a text of JSON is the same."""

    def row(names, arguments):
        parameters = {"properties": {name: {"type": "string"} for name in names}}
        calls = [{"function": {"name": "f", "arguments": arguments}}]
        said = [{"role": "user", "content": "Go"}, {"role": "assistant", "content": "Ok."}]
        said.insert(1, {"role": "assistant", "content": "", "tool_calls": calls})
        return {"tools": [{"function": {"name": "f", "parameters": parameters}}], "messages": said}

    given = [{"city": "Ulm"}, {"a": "1", "b": "2"}]
    objects = [row(one, one) for one in given]
    texts = [row(one, json.dumps(one, separators=(",", ":"))) for one in given]
    parquet.write_table(pyarrow.Table.from_pylist(objects), tmp_path / "a.parquet")
    assert parquet.read_table(tmp_path / "a.parquet").to_pylist() != objects  # it has nulls
    (tmp_path / "t.jinja").write_text(
        "{{ tools | tojson }}{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
        "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    )
    found = []
    for name, some in (("a.parquet", None), ("objects.jsonl", objects), ("texts.jsonl", texts)):
        file = tmp_path / name if some is None else write_rows(tmp_path, some, name)
        options = ("--chat", "--chat-template", tmp_path / "t.jinja", "--eval-fraction", "0")
        assert run(file, *options, "--out", tmp_path / file.stem) == 0
        found.append(conversations(tmp_path / f"{file.stem}.train.bin"))
    assert [targets for _, targets in found[0]] == [f"{json.dumps(one)}Ok." for one in given]
    assert not any("null" in text for text, _ in found[0])
    assert found[0] == found[1] == found[2]


def test_a_template_that_takes_no_example_is_remembered_without_an_end(tmp_path):
    (tmp_path / "t.jinja").write_text(
        "{% if messages[0].role != 'system' %}{{ raise_exception('no task') }}{% endif %}" + BYTES
    )
    path = write_rows(tmp_path, [{"system": "s", "prompt": "q", "completion": "a"}])
    options = ("--chat", "--chat-template", tmp_path / "t.jinja", "--out", tmp_path / "x")
    assert run(path, *options, "--eval-fraction", "0") == 0
    form = read_sidecar(tmp_path / "x.train.bin").chat
    assert (form.tokens, form.end_ids) == ({"eos_token": "<|endoftext|>"}, [])


def test_a_template_that_no_sidecar_could_hold_is_refused(tmp_path, command, capsys):
    (tmp_path / "bytes.jinja").write_text("{# " + "x" * 2**20 + " #}" + BYTES)
    assert run(*command) == 2
    assert "chat template is too large" in capsys.readouterr().err
    assert not [path for path in (tmp_path / "out").iterdir() if path.suffix == ".json"]


def test_token_files_remember_the_template_and_where_answers_end(tmp_path):
    path = write_model(tmp_path / "model", template=INST)
    chat = write_rows(tmp_path, rows(6))
    flags = ("--chat", "--eval-fraction", "0", "--tokenizer", path)
    assert run(chat, *flags, "--out", tmp_path / "own") == 0
    sidecar = read_sidecar(tmp_path / "own.train.bin")
    ids = FileTokenizer(path)
    assert (sidecar.format_version, sidecar.bos_id) == (3, ids.bos_id)
    assert sidecar.chat == ChatForm(INST, {"bos_token": "<s>", "eos_token": "</s>"}, [ids.eos_id])
    # Another template than the model's, whose answers end otherwise.
    (tmp_path / "named.jinja").write_text(CHATML)
    named = ("--chat-template", tmp_path / "named.jinja", "--out", tmp_path / "named")
    assert run(chat, *flags, *named) == 0
    form = read_sidecar(tmp_path / "named.train.bin").chat
    ended = load_library(path).token_to_id("<|im_end|>")
    assert (form.template, form.end_ids) == (CHATML, [ended])
    # What identifies the data is the same as before templates were remembered.
    found = read_sidecar(tmp_path / "named.train.bin")
    before = dataclasses.replace(found, format_version=2, bos_id=None, chat=None)
    assert before.content_digest() == found.content_digest()
    # Text first, then conversations: what is remembered is theirs.
    (tmp_path / "a.txt").write_text("all")
    text = ("--tokenizer", path, "--eval-fraction", "0", "--out", tmp_path / "a")
    assert run(tmp_path / "a.txt", *text) == 0
    both = tuple(str(tmp_path / f"{name}.train.bin") for name in ("a", "named"))
    assert describe_tokens(DataConfig("tokens", both)).sidecar == found
