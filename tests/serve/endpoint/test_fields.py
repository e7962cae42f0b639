"""Bodies of any kind are read or refused, by the readers alone and by the whole server."""

import copy
import json
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.serve.endpoint import chat, completions
from moejax.serve.endpoint.fields import Fields, RefusedError, parse_object, to_json
from moejax.serve.endpoint.jobs import Job
from tests.serve.endpoint.serving import POSITIONS, SAID, Scripted, metric, served_model, serving

pytestmark = pytest.mark.usefixtures("unchecked_annotations")  # of many calls
MESSAGES = [
    {"role": "system", "content": "be \u20ac"},
    {"role": "user", "content": [{"type": "text", "text": "x"}]},
]
COMMON = {"model": "bytes", "temperature": 0.5, "top_p": 0.9, "n": 2, "stop": ["a", "\u20ac"]}
COMMON |= {"seed": 7, "stream": True, "stream_options": {"include_usage": True}, "top_k": 4}
COMMON |= {"logit_bias": {}, "user": "me", "presence_penalty": 0, "min_p": 0.1, "max_tokens": 9}
VALID = [
    (completions, {"prompt": "text", "logprobs": 3, "echo": True, "suffix": None, **COMMON}),
    (completions, {"prompt": [[1, 2], [3]], "best_of": 1, **COMMON}),
    (completions, {"prompt": ["a", "b"], "max_tokens": 0, "echo": True}),
    (chat, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, **COMMON}),
    (chat, {"messages": MESSAGES[1:], "max_completion_tokens": 4, "tools": []}),
]
VALUES = [None, True, False, 0, -1, 1, 20, 21, 1.5, -0.0, 1e308, 10**30, -(10**400), 2**64]
VALUES += ["", "x", "\ud800", "\udfff\ud800", "\x00", "\ufdd0", "x" * 2000, "<|endoftext|>"]
VALUES += [
    [],
    {},
    [[]],
    [{}],
    [None],
    [1, "a"],
    [[1], "a"],
    {"a": {"b": []}},
    [0] * 300,
    ["x"] * 99,
]
VALUES += [{"type": "text", "text": 1}, {"role": "user", "content": None}, [[[[[1]]]]], ["x"] * 99]
BYTES = served_model(chat=False)


def places(value, path=()):
    """The paths to every value inside a value."""
    yield path
    listed = list(enumerate(value)) if isinstance(value, list) else []
    for key, one in value.items() if isinstance(value, dict) else listed:
        yield from places(one, (*path, key))


def changed(body, draw):
    """A body with a value replaced, added or taken away, or with other bytes."""
    body = copy.deepcopy(body)
    for _ in range(draw.randint(1, 3)):
        *way, last = draw.choice([path for path in places(body) if path] or [("x",)])
        inner = body
        for key in way:
            inner = inner[key]
        kind = draw.random()
        if kind < 0.7:
            inner[last] = copy.deepcopy(draw.choice(VALUES))
        elif kind < 0.85:
            inner.pop(last)
        elif isinstance(inner, dict):
            inner[draw.choice(["wings", "echo", "tools", "\ud800", "content", "n"])] = draw.choice(
                VALUES
            )
    text = bytearray(json.dumps(body).encode())
    if draw.random() < 0.2:
        for _ in range(draw.randint(1, 4)):
            text[draw.randrange(len(text))] = draw.randrange(256)
    return bytes(text)


def bodies(count, seed=0):
    draw = random.Random(seed)
    for _ in range(count):
        form, body = draw.choice(VALID)
        yield form, changed(body, draw)


def read(form, body, model):
    """The job of a body, or how it is refused."""
    refused = None
    try:
        return form.read(parse_object(body), model)
    except RefusedError as error:
        refused = error
    assert 400 <= refused.status < 500
    assert "\n" not in str(refused)
    assert set(json.loads(to_json(refused.body()))) == {"error"}
    return refused


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.exhaustive)])
def test_changed_bodies_are_read_or_refused(count):
    model, begin = served_model(), time.monotonic()
    for form, body in VALID:
        assert isinstance(read(form, json.dumps(body).encode(), model), Job)
    found = [read(form, body, model) for form, body in bodies(count)]
    jobs = [one for one in found if isinstance(one, Job)]
    assert 0.05 < len(jobs) / count < 0.5, "both kinds come about"
    for job in jobs:
        assert len(job.requests) <= model.texts
        assert all(len(r.ids) + r.tokens <= POSITIONS for r in job.requests)
    assert time.monotonic() - begin < 120


def test_the_server_outlives_changed_bodies():
    """And says what it always says. No answer is an error of the server."""
    with serving(Scripted()) as served:
        assert served.ready.wait(10)
        paths = {completions: "/v1/completions", chat: "/v1/chat/completions"}
        statuses = set()
        for form, body in bodies(400, seed=1):
            found = served.http.post(paths[form], content=body)
            statuses.add(found.status_code)
            assert found.status_code in (200, 400, 404), (body, found.text)
        assert {200, 400} <= statuses
        known = {"prompt": "x", "max_tokens": len(SAID.encode())}
        found = served.http.post("/v1/completions", json=known).json()
        assert found["choices"][0]["text"] == SAID
        assert metric(served, "moejax_requests_total", outcome="failed") == 0
        assert metric(served, "moejax_running_texts") == 0


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(body):
    read(completions, body, BYTES)
    read(completions, b'{"prompt": "' + body + b'"}', BYTES)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300)
@given(JSON)
def test_a_reader_gives_its_type_or_refuses(value):
    refused = object()

    def outcome(method, *arguments):
        try:
            return getattr(Fields({"a": value}), method)("a", *arguments)
        except RefusedError:
            return refused

    none = value is None
    assert outcome("flag") == (bool(value) if none or isinstance(value, bool) else refused)
    inside = type(value) is int and -5 <= value <= 5
    assert outcome("whole", -5, 5) == (value if inside or none else refused)
    in_range = type(value) in (int, float) and 0 <= value <= 1
    assert outcome("number", "rule", 0, 1) == (value if in_range or none else refused)
    assert outcome("text") == (value if isinstance(value, str) or none else refused)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("x" * 100, f"Got '{'x' * 60}...'."),
        ({"a": 1}, "Got an object."),
        (10**50, "Got a number."),
        (True, "Got true."),
        ("a\nb", "Got 'a b'."),
    ],
)
def test_a_message_shows_a_short_value(value, said):
    with pytest.raises(RefusedError) as error:
        Fields({"n": value}, "outer.").whole("n", 1, 2)
    assert str(error.value) == (
        f"`outer.n` is wrong. {said} It is a whole number from 1 to 2. Change it."
    )
    assert error.value.param == "outer.n"


def test_a_text_of_tokens_that_the_model_lacks_is_refused():
    """A tokenizer may be larger than the vocabulary: id 256 begins a text of bytes."""
    body = b'{"prompt": "y", "max_tokens": 1}'
    assert isinstance(read(completions, body, served_model(vocab_size=257)), Job)
    refused = read(completions, body, served_model(vocab_size=256))
    assert "Its id is 256, the model has 256 tokens" in str(refused)
    assert refused.status == 400
