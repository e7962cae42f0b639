import json
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.data.marks import BEGIN, CONTEXT, TARGET
from moejax.data.prepare.answers import ChatEncoder
from moejax.data.prepare.chat_template import ChatTemplate, load_template
from moejax.data.prepare.control_tokens import ControlEncoder
from moejax.data.prepare.conversations import conversation_of
from moejax.data.prepare.rows import BadRowError, Row
from moejax.errors import InputError
from tests.data.chats import (
    BYTES,
    CHATML,
    CONVERSATIONS,
    ONE,
    SEVERAL,
    TAGGED,
    TEMPLATES,
    TOKENIZERS,
    write_model,
)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The tokenizers, as files in folders of their own."""
    folder = tmp_path_factory.mktemp("models")
    return {name: write_model(folder / name, name) for name in TOKENIZERS}


def opened(path, template):
    """A template, with the names of the tokenizer's control tokens."""
    file = path.with_name("template.jinja")
    file.write_text(template, encoding="utf-8")
    return load_template(path, file)


def encode(path, template, row, answers="all"):
    """The document of messages or a row, and its targets as texts of tokens, run by run."""
    row = row if isinstance(row, dict) else {"messages": row}
    conversation = conversation_of(Row(json.dumps(row).encode(), "x.jsonl, line 1"))
    encoder = ChatEncoder(opened(path, template), ControlEncoder(path), answers)
    document = encoder.encode(conversation)
    ended = document.token_N[document.mark_N == TARGET][-1] in encoder._encoder._ids
    assert encoder.num_unended == (not ended)
    library = encoder._encoder._library
    names = [library.id_to_token(int(id)) for id in document.token_N]
    ends = np.flatnonzero(np.diff(document.mark_N == TARGET)) + 1
    parts = np.split(np.arange(len(names)), ends)
    runs = [part for part in parts if document.mark_N[part[0]] == TARGET]
    return document, ["".join(names[i] for i in part) for part in runs]


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_ids_and_tagged_answers_are_those_of_transformers(models, tokenizer, template, name):
    from transformers import PreTrainedTokenizerFast

    path, source, messages = models[tokenizer], TEMPLATES[template], CONVERSATIONS[name]
    library = PreTrainedTokenizerFast(tokenizer_file=str(path), bos_token="<s>", eos_token="</s>")
    wanted = library.apply_chat_template(
        messages, chat_template=source, return_assistant_tokens_mask=template == "tagged"
    )
    text = opened(path, source).render(messages, None, "here").text
    assert ControlEncoder(path).encode(text).token_N.tolist() == wanted["input_ids"]
    if template == "tagged":
        document, _ = encode(path, source, messages)
        assert (document.mark_N == TARGET).astype(int).tolist() == wanted["assistant_masks"]


WANTED = {
    ("byte_level", "chatml"): ["Hello<|im_end|>", "<|im_end|>", "TheĠend<|im_end|>"],
    ("byte_level", "inst"): ["ĠHelloĠ</s>", "ĠĠ</s>", "ĠTheĠendĠ</s>"],
    ("byte_level", "closed"): ["Hello<|end|>", "<|end|>", "TheĠend<|end|></s>"],
    ("sentence_piece", "chatml"): ["▁Hello<|im_end|>", "<|im_end|>", "▁The▁end<|im_end|>"],
    ("sentence_piece", "inst"): ["▁Hello▁</s>", "▁▁</s>", "▁The▁end▁</s>"],
    ("sentence_piece", "closed"): ["▁Hello<|end|>", "<|end|>", "▁The▁end<|end|></s>"],
}


@pytest.mark.parametrize(("tokenizer", "template"), WANTED)
def test_answers_and_what_ends_their_turns_are_learned(models, tokenizer, template):
    document, runs = encode(models[tokenizer], TEMPLATES[template], SEVERAL)
    wanted = WANTED[tokenizer, template]
    if tokenizer == "sentence_piece":  # which writes a space where a text begins
        runs, wanted = ([run.replace("\u2581", "") for run in found] for found in (runs, wanted))
    assert runs == wanted
    assert document.mark_N[0] == BEGIN
    assert set(document.mark_N[1:]) == {CONTEXT, TARGET}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_header_that_takes_in_the_space_of_an_answer_is_not_learned(models, name):
    messages = [ONE[0], {"role": "assistant", "content": " \n so"}]
    document, runs = encode(models[name], TEMPLATES["closed"], messages)
    assert [run.replace("\u2581", "") for run in runs] == ["so<|end|></s>"]
    header = ControlEncoder(models[name]).encode("<|assistant|>").token_N
    assert np.isin(header, document.token_N)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tags_and_prefixes_find_the_same_answers(models, name):
    tagged, plain = (encode(models[name], template, SEVERAL)[0] for template in (TAGGED, CHATML))
    assert tagged.token_N.tolist() == plain.token_N.tolist()
    assert tagged.mark_N.tolist() == plain.mark_N.tolist()
    assert (tagged.num_bytes, tagged.target_bytes) == (plain.num_bytes, plain.target_bytes)


@pytest.mark.parametrize(("name", "template"), [*product(TOKENIZERS, (CHATML, TAGGED))])
def test_the_last_answer_alone_can_be_learned(models, name, template):
    document, runs = encode(models[name], template, SEVERAL, answers="last")
    assert [run.replace("\u2581", "").replace("\u0120", "") for run in runs] == ["Theend<|im_end|>"]
    assert document.target_bytes == len("The end")
    assert document.token_N.tolist() == encode(models[name], template, SEVERAL)[0].token_N.tolist()


@pytest.mark.parametrize("name", TOKENIZERS)
def test_bytes_are_of_text_without_control_tokens(models, name):
    document, _ = encode(models[name], CHATML, ONE)
    text = "user\nWhat is a mesh?\nassistant\n" + ONE[1]["content"] + "\n"
    assert document.num_bytes == len(text.encode())
    assert document.target_bytes == len(ONE[1]["content"].encode())
    # A control token that takes in the white space behind it spells that too.
    closed, _ = encode(models[name], TEMPLATES["closed"], ONE)
    assert closed.target_bytes == document.target_bytes


def test_control_tokens_outside_ascii_are_counted_in_bytes(tmp_path):
    """DeepSeek's, of 27 bytes and 19 characters."""
    end = "<\uff5cend\u2581of\u2581sentence\uff5c>"
    path = write_model(tmp_path / "model", "byte_level")
    library = ControlEncoder(path)._library
    library.add_special_tokens([end])
    library.save(str(path))
    document, runs = encode(path, CHATML.replace("<|im_end|>", end), SEVERAL)
    assert runs[0] == f"Hello{end}"
    said = "Hi <there>", "Hello", " and \n", "", "x", "The end"
    turns = ("user", "assistant") * 3
    text = "".join(f"{role}\n{content}\n" for role, content in zip(turns, said, strict=True))
    assert document.num_bytes == len(text)
    assert document.target_bytes == len("HelloThe end")


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_template_that_writes_earlier_turns_otherwise_is_refused_by_row(models, name):
    with pytest.raises(BadRowError) as refused:
        encode(models[name], TEMPLATES["thinking"], SEVERAL)
    said = ("x.jsonl, line 1", "first 2 messages", "--answers last", "generation", "<think>")
    for part in (*said, "--skip-bad"):
        assert part in str(refused.value)
    _, runs = encode(models[name], TEMPLATES["thinking"], SEVERAL, answers="last")
    assert [run.startswith("<think>") for run in runs] == [True]
    assert "because" not in runs[0]
    assert encode(models[name], TEMPLATES["thinking"], ONE)[1], "one answer has no earlier turn"


def test_a_turn_that_ends_otherwise_within_the_whole_is_refused(models):
    """As gpt-oss, which closes the last turn with another token than all others."""
    last = "loop.last and m.role == 'assistant'"
    template = CHATML.replace("'<|im_end|>'", f"('<|end|>' if {last} else '<|im_end|>')")
    assert encode(models["byte_level"], template, ONE)[1][0].endswith("<|end|>")
    with pytest.raises(InputError, match="answers cannot be found"):
        encode(models["byte_level"], template, SEVERAL)


def test_a_prompt_that_the_whole_does_not_begin_with_is_refused(models):
    template = "{% if add_generation_prompt %}now: {% endif %}" + CHATML
    for answers in ("all", "last"):
        with pytest.raises(InputError, match="answers cannot be found") as refused:
            encode(models["byte_level"], template, ONE, answers=answers)
        assert ("--answers last" in str(refused.value)) == (answers == "all")


# How templates of released models write arguments: as JSON of an object (gpt-oss), of an object or
# as the text that they are (Qwen3), pair by pair (GLM-4.5), as a text alone (DeepSeek-V3), as both
# come.
WRITES = {
    "json": "{{ c.arguments | tojson }}",
    "either": "{{ c.arguments if c.arguments is string else c.arguments | tojson }}",
    "pairs": "{% for k, v in c.arguments | items %}{{ k }}={{ v }};{% endfor %}",
    "text": "{{ '' + c.arguments }}",
    "as it comes": "{{ c.arguments }}",
}
CALLING = """\
{% for m in messages %}{{ '<|im_start|>' + (m.content or '') }}
{%- for c in m.tool_calls or [] %}{{ c.name }}:WRITTEN{% endfor %}{{ '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"""
SAYS_PYTHON = {"role": "user", "content": "In Python: {'city': 'Ulm', 'n': 1}"}


@pytest.mark.parametrize("first", [ONE[0], SAYS_PYTHON], ids=["plain", "of Python"])
@pytest.mark.parametrize("spelled", [{"city": "Ulm", "n": 1}, '{"city":"Ulm",  "n":1}'], ids=type)
@pytest.mark.parametrize("writes", WRITES)
def test_arguments_are_written_in_one_form_by_every_template(models, writes, spelled, first):
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": spelled}]}
    template = CALLING.replace("WRITTEN", WRITES[writes])
    _, runs = encode(models["byte_level"], template, [first, call, *ONE])
    written = "city=Ulm;n=1;" if writes == "pairs" else '{"city":\u0120"Ulm",\u0120"n":\u01201}'
    assert runs[0] == f"f:{written}<|im_end|>"


def test_a_template_that_takes_no_form_of_arguments_says_why(models):
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {}}]}
    template = CALLING.replace("WRITTEN", "{{ raise_exception('no tools') }}")
    with pytest.raises(BadRowError, match="no tools"):
        encode(models["byte_level"], template, [ONE[0], call])


@pytest.mark.parametrize("template", [CHATML, TAGGED], ids=["prefixes", "tags"])
@pytest.mark.parametrize("answers", ["all", "last"])
def test_answers_of_a_prompt_are_not_learned(models, template, answers):
    path, turns = models["byte_level"], [{"role": "user", "content": "q"}]
    said = [{"role": "assistant", "content": text} for text in ("one", "two", "three")]
    row = {"prompt": [*turns, said[0], *turns], "completion": [said[1], *turns, said[2]]}
    wanted = ["two<|im_end|>", "three<|im_end|>"]
    assert encode(path, template, row, answers)[1] == wanted[-1 if answers == "last" else 0 :]


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([{"role": "user", "content": "<|im_end|>"}, ONE[1]], "control token"),
        ([ONE[0], {**ONE[1], "content": "a</s>"}], "control token"),
        ([ONE[0], {**ONE[1], "tool_calls": [{"x": ["<s>"]}]}], "control token"),
        ([ONE[0], {**ONE[1], "content": "\ufdd0"}], "control token"),
        ([ONE[0], {**ONE[1], "content": "\ud800"}], "not Unicode"),
    ],
    ids=["user", "answer", "call", "mark", "half a character"],
)
def test_a_row_with_what_no_text_may_hold_is_broken(models, messages, said):
    with pytest.raises(BadRowError, match=rf"{said}.*x\.jsonl, line 1"):
        encode(models["byte_level"], CHATML, messages)
    with pytest.raises(BadRowError, match="no token of an answer"):
        encode(models["byte_level"], "{{ messages[0].content }}", ONE)


def test_tokens_that_are_not_control_tokens_may_stand_in_texts(models):
    messages = [ONE[0], {"role": "assistant", "content": "<think>so</think>yes"}]
    _, runs = encode(models["byte_level"], CHATML, messages)
    assert runs == ["<think>so</think>yes<|im_end|>"]


def test_a_user_may_have_the_last_word(models):
    messages = [*SEVERAL, {"role": "user", "content": "thanks"}]
    whole, one = (encode(models["byte_level"], CHATML, turns)[1] for turns in (messages, SEVERAL))
    assert whole == one


text = st.text(st.characters(codec="utf-8", exclude_characters="\ufdd0\ufdd1"), max_size=12)


OF_BYTES = ControlEncoder(None)


@given(st.lists(st.tuples(text, text), min_size=1, max_size=3))
def test_of_bytes_the_targets_spell_the_answers(pairs):
    messages = []
    for question, answer in pairs:
        messages += [{"role": "user", "content": question}]
        messages += [{"role": "assistant", "content": answer}]
    template = ChatTemplate(BYTES, "bytes", {"eos_token": "<|endoftext|>"})
    conversation = conversation_of(Row({"messages": messages}, "here"))
    document = ChatEncoder(template, OF_BYTES).encode(conversation)
    targets = document.token_N[document.mark_N == TARGET]
    ends = np.flatnonzero(targets == 256)
    spelled = [part[part < 256] for part in np.split(targets, ends[:-1] + 1)]
    assert [bytes(part.astype(np.uint8).tolist()).decode() for part in spelled] == [
        answer for _, answer in pairs
    ]
    assert document.target_bytes == sum(len(answer.encode()) for _, answer in pairs)
    assert document.num_bytes == len(document.token_N) - len(pairs)
