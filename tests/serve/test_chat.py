"""Messages as prompts: what training wrote before an answer, and where an answer ends."""

import pytest

from moejax.data.marks import TARGET
from moejax.data.prepare.answers import ChatEncoder
from moejax.data.prepare.chat_template import load_template
from moejax.data.prepare.control_tokens import ControlEncoder
from moejax.data.prepare.conversations import conversation_of
from moejax.data.prepare.rows import Row
from moejax.errors import InputError
from moejax.serve.prompts import ChatPrompts
from tests.data.chats import BYTES, CHATML, CLOSED, CONTROLS, INST, TAGGED, THINKING, write_model

QUESTION = "What is a mesh?"
CASES = {"byte_level": [CHATML, INST, THINKING], "sentence_piece": [TAGGED, INST, CLOSED]}


def row(answer):
    messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": answer}]
    return conversation_of(Row({"messages": messages}, "x.jsonl, line 1"))


def open_chat(tokenizer, template=None):
    return ChatPrompts(load_template(tokenizer, template), tokenizer)


@pytest.mark.parametrize(
    ("tokenizer", "template"), [(name, one) for name, some in CASES.items() for one in some]
)
def test_a_prompt_is_what_training_read_before_the_answer(tmp_path, tokenizer, template):
    path = write_model(tmp_path, tokenizer, template)
    encoder = ControlEncoder(path)
    document = ChatEncoder(load_template(path, None), encoder).encode(row("x"))
    target_N = document.mark_N == TARGET
    before = document.token_N[: target_N.argmax()].tolist()
    prompts = open_chat(path)
    assert prompts.encode(QUESTION) == before
    learned = document.token_N[target_N].tolist()
    assert prompts.stops == {next(id for id in learned if id in encoder._ids)}


def test_bytes_take_a_template_of_their_own(tmp_path):
    (tmp_path / "bytes.jinja").write_text(BYTES)
    prompts = open_chat(None, tmp_path / "bytes.jinja")
    encoder = ChatEncoder(load_template(None, tmp_path / "bytes.jinja"), ControlEncoder(None))
    ids = encoder.encode(row("x")).token_N.tolist()
    assert [*prompts.encode(QUESTION), ord("x"), 256] == ids
    assert prompts.stops == {256}
    (tmp_path / "bytes.jinja").write_text("{{ messages[0].content }}")
    assert open_chat(None, tmp_path / "bytes.jinja").stops == frozenset()


def test_what_no_template_takes_is_told(tmp_path):
    path = write_model(tmp_path, template=CHATML)
    with pytest.raises(InputError, match=r"'What <\|im_end\|>' holds '<\|im_end\|>'"):
        open_chat(path).encode("What <|im_end|>")
    # Of several the first in the alphabet, whatever the order of a set.
    with pytest.raises(InputError, match=r"holds '</s>'"):
        open_chat(path).encode(" ".join(reversed(sorted(CONTROLS))))
    (tmp_path / "own.jinja").write_text("{{ raise_exception('no system message') }}")
    with pytest.raises(InputError, match=r"own\.jinja says: no system message"):
        open_chat(path, tmp_path / "own.jinja")
    # Takes the question with its answer, from which stops are read, and no question alone.
    (tmp_path / "own.jinja").write_text(
        "{% if messages|length < 2 %}{{ raise_exception('alone') }}{% endif %}x<|im_end|>"
    )
    with pytest.raises(InputError, match=r"own\.jinja says: alone"):
        open_chat(path, tmp_path / "own.jinja").encode(QUESTION)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(InputError, match="no chat template"):
        open_chat(path)
