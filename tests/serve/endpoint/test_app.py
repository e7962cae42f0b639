"""The server by real sockets and the real client, over a batch whose text is known."""

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from moejax.errors import InputError
from moejax.serve.endpoint import completions
from moejax.serve.endpoint.app import BODY_BYTES
from moejax.serve.endpoint.server import listen
from moejax.serve.experts.places import Places
from tests.docs.pages import blocks_of
from tests.serve.endpoint.serving import (
    NAME,
    POSITIONS,
    SAID,
    Scripted,
    metric,
    posted,
    raw,
    serving,
    until,
)

BYTES = len(SAID.encode())


@pytest.fixture(scope="module")
def served():
    with serving(Scripted()) as found:
        assert found.ready.wait(10)
        yield found
        assert found.batch.running == found.batch.waiting == 0


@pytest.fixture
def clear(served):
    """Sees that a test leaves no text behind."""
    yield served
    served.batch.go.set()
    served.batch.pace = 0.0
    until(lambda: metric(served, "moejax_running_texts") == 0)
    assert metric(served, "moejax_waiting_texts") == 0


def refusal(served, body, path="/v1/completions", **headers):
    """The status and the error of a body that is refused."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    found = served.http.post(path, content=content, headers=headers)
    error = found.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    return found.status_code, error


def test_a_completion_is_the_text_with_its_usage(served):
    found = served.openai.completions.create(model=NAME, prompt="xy", max_tokens=5)
    (choice,) = found.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == ("one \ufffd", "length", None)
    assert found.usage is not None
    usage = found.usage
    # A token begins the document.
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 5, 8)
    assert (found.model, found.object) == (NAME, "text_completion")


def test_sixteen_tokens_are_the_default_and_null_asks_for_it(served):
    for more in ({}, {"max_tokens": None, "stop": None, "suffix": None, "new": None}):
        found = served.http.post("/v1/completions", json={"prompt": "x", **more}).json()
        assert found["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("prompt", "counts"),
    [
        ("ab", 3),
        (["ab", "c"], 3 + 2),
        ([97, 98, 99], 3),
        ([[97, 98], [99]], 2 + 1),
        ("", 1),
    ],
)
def test_a_prompt_is_text_ids_or_several(served, prompt, counts):
    found = served.openai.completions.create(model=NAME, prompt=prompt, max_tokens=3, n=2)
    several = len(prompt) if isinstance(prompt, list) and prompt[0] != 97 else 1
    assert [choice.index for choice in found.choices] == list(range(2 * several))
    assert {choice.text for choice in found.choices} == {"one"}
    assert found.usage is not None
    assert found.usage.prompt_tokens == counts
    assert found.usage.completion_tokens == 3 * 2 * several


def test_echo_and_logprobs_begin_with_the_prompt(served):
    found = served.openai.completions.create(
        model=NAME, prompt=[97, 0xE2, 0x82, 0xAC, 98], max_tokens=6, echo=True, logprobs=1
    )
    (choice,) = found.choices
    assert choice.text == "a\u20acb" + "one \ufffd"
    logprobs = choice.logprobs
    assert logprobs is not None
    inside = ["bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"]
    assert logprobs.tokens == ["a", *inside, "b", *"one ", *inside[:2]]
    assert logprobs.token_logprobs == [None, *[-1.0] * 4, *[-0.5] * 6]
    assert logprobs.text_offset == [0, 1, 1, 1, 2, 3, 4, 5, 6, 7, 7]
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] is None
    # The token's own log probability stands beside the likeliest.
    assert logprobs.top_logprobs[1] == {"bytes:\\xe2": -1.0}
    assert logprobs.top_logprobs[6] == {"o": -0.25, "n": -0.5}


def test_a_prompt_alone_is_scored(served):
    found = served.openai.completions.create(
        model=NAME, prompt="ab", max_tokens=0, echo=True, logprobs=0
    )
    (choice,) = found.choices
    assert (choice.text, choice.finish_reason) == ("ab", "length")
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == [None, -1.0, -1.0]
    assert choice.logprobs.top_logprobs is None
    assert found.usage is not None
    assert found.usage.completion_tokens == 0


@pytest.mark.parametrize(
    ("stop", "wanted"),
    [
        ("two", "one \u20ac "),
        (["three", " t"], "one \u20ac"),
        ("\u20ac two", "one "),
        ("\U0001f600", "one \u20ac two "),
        ("one", ""),
        ("absent", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_a_text_and_frees_its_slot(clear, stop, wanted, stream):
    """The first byte of a character never shows whether its last ones make the stop string."""
    clear.batch.log.clear()
    clear.batch.pace = 0.02 if wanted is not None else 0.0  # else a busy machine cancels too late
    found = clear.openai.completions.create(
        model=NAME, prompt="x", max_tokens=100, stop=stop, logprobs=0, stream=stream
    )
    if stream:
        chunks = list(found)
        text = "".join(chunk.choices[0].text for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
        tokens = [token for chunk in chunks for token in chunk.choices[0].logprobs.tokens]
    else:
        (choice,) = found.choices
        text, reason, tokens = choice.text, choice.finish_reason, choice.logprobs.tokens
    if wanted is None:
        assert reason == "length"
        assert len(tokens) == 100
        return
    assert (text, reason, len(tokens)) == (wanted, "stop", len(wanted.encode()))
    until(lambda: clear.batch.running == 0)
    # The tokens of the text and its stop, and some while the cancellation was on its way.
    assert sum(clear.batch.log) < 60


def test_a_stop_string_frees_a_slot_while_other_texts_go_on(clear):
    clear.batch.log.clear()
    clear.batch.pace = 0.01
    found = clear.openai.completions.create(
        model=NAME, prompt=["x", "z"], max_tokens=100, stop="one"
    )
    assert [choice.text for choice in found.choices] == ["", "two \U0001f600 three. "]
    assert clear.batch.log.count(2) < 15 < clear.batch.log.count(1) + 5
    assert found.usage is not None
    assert found.usage.completion_tokens == 3 + len("two \U0001f600 three. one".encode())


def test_a_stream_is_the_text_in_pieces(served):
    stream = served.openai.completions.create(
        model=NAME,
        prompt="x",
        max_tokens=2 * BYTES,
        stream=True,
        n=2,
        stream_options={"include_usage": True},
    )
    texts, reasons, last = ["", ""], [None, None], None
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
        last = chunk
    assert (texts, reasons) == ([2 * SAID] * 2, ["length"] * 2)
    assert last is not None
    assert (last.choices, last.usage.completion_tokens) == ([], 4 * BYTES)


def test_a_stream_is_events_that_end_with_done(served):
    body = {"prompt": "x", "max_tokens": 7, "stream": True}
    found = served.http.post("/v1/completions", json=body)
    assert found.headers["content-type"].startswith("text/event-stream")
    events = found.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    pieces = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events[:-2]]
    assert [piece["text"] for piece in pieces] == ["o", "n", "e", " ", "\u20ac"]
    assert [piece["finish_reason"] for piece in pieces] == [None] * 4 + ["length"]


def test_a_chat_answers_messages_through_the_template(served):
    messages = [
        {"role": "system", "content": "be"},
        {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "no"},
    ]
    found = served.openai.chat.completions.create(
        model=NAME, messages=messages, max_tokens=7, logprobs=True, top_logprobs=1, n=2
    )
    assert [choice.message.content for choice in found.choices] == ["one \u20ac"] * 2
    assert found.choices[0].message.role == "assistant"
    assert found.usage is not None
    assert found.usage.prompt_tokens == len("<s>be<u>hi<a>yes<u>no<a>")
    tokens = found.choices[0].logprobs.content
    assert [token.bytes for token in tokens] == [[111], [110], [101], [32], None, None, None]
    assert [token.logprob for token in tokens] == [-0.5] * 7
    assert [(top.token, top.logprob) for top in tokens[1].top_logprobs] == [("o", -0.25)]
    # Without a number it goes on as far as there are positions.
    whole = served.openai.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": "x"}]
    )
    assert whole.usage.total_tokens == POSITIONS


def test_a_chat_streams(served):
    stream = served.openai.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": "x"}],
        max_completion_tokens=BYTES,
        stop=["two"],
        stream=True,
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "one \u20ac "
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_the_program_of_the_guide_runs(served, capsys):
    (block,) = (block for block in blocks_of("docs/guide/serve.md") if block.name == "ask.py")
    exec(block.text.replace("http://127.0.0.1:8000/v1", served.url), {})
    shown, scores = capsys.readouterr().out.split("[", 1)
    assert shown == (SAID * 9)[: len(shown)]
    assert len(shown.encode()) > 55
    assert scores.startswith("None, -1.0, ")


def test_models_health_and_metrics(served):
    (model,) = served.openai.models.list().data
    assert (model.id, model.owned_by) == (NAME, "moejax")
    assert served.http.get("/health").json() == {"status": "ready"}
    done = metric(served, "moejax_requests_total", outcome="done")
    names = ("prompt_tokens_total", "generated_tokens_total", "first_token_seconds_count")
    before = [metric(served, f"moejax_{name}") for name in names]
    served.openai.completions.create(model=NAME, prompt="abc", max_tokens=5)
    after = [metric(served, f"moejax_{name}") for name in names]
    assert [new - old for new, old in zip(after, before, strict=True)] == [4, 5, 1]
    assert metric(served, "moejax_requests_total", outcome="done") == done + 1
    text = served.http.get("/metrics")
    assert "_created" not in text.text
    assert text.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert re.search(r'^moejax_next_token_seconds_bucket\{le="0.005"\} \d', text.text, re.MULTILINE)
    assert "moejax_expert" not in text.text, "there are no slots for experts"


class Counted(Places):
    """Says how often experts moved."""

    def __init__(self):
        self.replanned, self.moved, self.overflowed = 2, 6, 0


def test_moves_of_experts_are_counted():
    places = Counted()
    with serving(Scripted(), places=places) as found:
        assert found.ready.wait(10)
        for _ in range(2):
            found.openai.completions.create(model=NAME, prompt="abc", max_tokens=5)
            assert metric(found, "moejax_expert_tables_total") == places.replanned
            assert metric(found, "moejax_experts_moved_total") == places.moved
            assert metric(found, "moejax_overflowed_choices_total") == places.overflowed
            places.replanned, places.moved, places.overflowed = 3, 7, 40


BAD = [
    ({}, 400, "prompt"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": [[]]}, 400, "prompt"),
    ({"prompt": [97, "a"]}, 400, "prompt"),
    ({"prompt": [True]}, 400, "prompt"),
    ({"prompt": {"a": 1}}, 400, "prompt"),
    ({"prompt": [264]}, 400, "prompt"),
    ({"prompt": [-1]}, 400, "prompt"),
    ({"prompt": "\ud800"}, 400, "prompt"),
    ({"prompt": "x" * POSITIONS}, 400, "prompt"),
    ({"prompt": "x" * 100, "max_tokens": 28}, 400, "max_tokens"),
    ({"prompt": "x", "max_tokens": POSITIONS + 1}, 400, "max_tokens"),
    ({"prompt": "x", "max_tokens": -1}, 400, "max_tokens"),
    ({"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
    ({"prompt": "x", "max_tokens": "5"}, 400, "max_tokens"),
    ({"prompt": "x", "max_tokens": 10**400}, 400, "max_tokens"),
    ({"prompt": "x", "temperature": -1}, 400, "temperature"),
    ({"prompt": "x", "temperature": True}, 400, "temperature"),
    ({"prompt": "x", "top_p": 0}, 400, "top_p"),
    ({"prompt": "x", "top_k": 0}, 400, "top_k"),
    ({"prompt": "x", "min_p": 2}, 400, "min_p"),
    ({"prompt": "x", "n": 0}, 400, "n"),
    ({"prompt": "x", "n": 17}, 400, "n"),
    ({"prompt": ["x"] * 9, "n": 2}, 400, "n"),
    ({"prompt": ["x"] * 17}, 400, "prompt"),
    ({"prompt": "x", "logprobs": 21}, 400, "logprobs"),
    ({"prompt": "x", "logprobs": True}, 400, "logprobs"),
    ({"prompt": "x", "stop": ["a"] * 17}, 400, "stop"),
    ({"prompt": "x", "stop": [""]}, 400, "stop"),
    ({"prompt": "x", "stop": "a" * 1001}, 400, "stop"),
    ({"prompt": "x", "stop": [5]}, 400, "stop"),
    ({"prompt": "x", "seed": 1.5}, 400, "seed"),
    ({"prompt": "x", "presence_penalty": 0.5}, 400, "presence_penalty"),
    ({"prompt": "x", "best_of": 2}, 400, "best_of"),
    ({"prompt": "x", "best_of": True}, 400, "best_of"),
    ({"prompt": "x", "logit_bias": {"5": 1}}, 400, "logit_bias"),
    ({"prompt": "x", "wings": 2}, 400, "wings"),
    ({"prompt": "x", "stream_options": {"include_usage": True}}, 400, "stream_options"),
    (
        {"prompt": "x", "stream": True, "stream_options": {"fast": True}},
        400,
        "stream_options.fast",
    ),
    ({"prompt": "x", "model": "other"}, 404, "model"),
    (b"\xff{}", 400, None),
    (b"{", 400, None),
    (b"[]", 400, None),
    (b'{"prompt": "x", "temperature": NaN}', 400, None),
    (b'{"prompt": "x", "temperature": 1e999}', 400, "temperature"),
    (b"[" * 200_000, 400, None),
    (b'{"seed": ' + b"9" * 5000 + b"}", 400, None),
]


@pytest.mark.parametrize(("body", "status", "param"), BAD)
def test_a_wrong_body_is_refused_in_one_line(served, body, status, param):
    found, error = refusal(served, body)
    assert (found, error["param"]) == (status, param)
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 500


CHAT = {"messages": [{"role": "user", "content": "x"}]}
BAD_CHATS = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": ["x"]}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "\udc00"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "<|endoftext|>"}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "messages[0].tool_calls"),
    ({**CHAT, "max_tokens": 0}, "max_tokens"),
    ({**CHAT, "top_logprobs": 2}, "top_logprobs"),
    ({**CHAT, "tools": [{"type": "function"}]}, "tools"),
    ({**CHAT, "echo": True}, "echo"),
]


@pytest.mark.parametrize(("body", "param"), BAD_CHATS)
def test_a_wrong_chat_is_refused_in_one_line(served, body, param):
    found, error = refusal(served, body, "/v1/chat/completions")
    assert (found, error["param"]) == (400, param)


def test_messages_that_the_template_does_not_take_are_told_in_the_clients_words():
    with serving(Scripted(), template="{{ 1 / messages[0].content | length }}") as found:
        assert found.ready.wait(10)
        body = {"messages": [{"role": "user", "content": ""}]}
        status, error = refusal(found, body, "/v1/chat/completions")
        assert (status, error["param"]) == (400, "messages")
        assert error["message"] == (
            "chat template does not take these messages. It says: division by zero. It decides "
            "which messages it takes. Write others, or use /v1/completions."
        )


@pytest.mark.parametrize(
    ("field", "accepted"),
    [({"best_of": 2}, "1"), ({"suffix": "x"}, '""'), ({"logit_bias": {"5": 1}}, "{}")],
)
def test_a_field_without_support_says_what_is_accepted(served, field, accepted):
    _, error = refusal(served, {"prompt": "x", **field})
    (name,) = field
    assert error["message"] == (
        f"`{name}` is not supported. Only {accepted} is accepted. Leave it out."
    )


def test_fields_that_ask_for_nothing_are_taken(served):
    neutral = {
        "presence_penalty": 0.0,
        "frequency_penalty": 0,
        "best_of": 1,
        "logit_bias": {},
        "user": "me",
        "suffix": None,
        "top_p": 1,
        "temperature": 0,
        "seed": -3,
    }
    found = served.http.post("/v1/completions", json={"prompt": "x", **neutral})
    assert found.status_code == 200


def test_logits_that_are_not_finite_end_their_own_text_only(clear):
    """The other request began before, and ends after."""
    clear.batch.pace = 0.01
    stream = clear.openai.completions.create(model=NAME, prompt="x", max_tokens=60, stream=True)
    pieces = [next(stream).choices[0].text]
    for more in ({}, {"stream": True}):
        with pytest.raises(openai.InternalServerError, match="logits are not finite"):
            clear.openai.completions.create(model=NAME, prompt="nan", **more)
    pieces += [chunk.choices[0].text for chunk in stream]
    assert "".join(pieces).startswith(SAID)


def test_a_client_that_goes_away_frees_its_slots(clear):
    clear.batch.pace = 0.05  # a text would take six seconds
    before = metric(clear, "moejax_requests_total", outcome="cancelled")
    for stream in (True, False):
        body = {"prompt": "x", "max_tokens": 120, "stream": stream, "n": 6}
        connection = raw(clear, posted("/v1/completions", json.dumps(body).encode()))
        until(lambda: metric(clear, "moejax_running_texts") == 4)
        connection.close()
        until(lambda: metric(clear, "moejax_running_texts") == 0, seconds=2)
        assert metric(clear, "moejax_waiting_texts") == 0
    assert metric(clear, "moejax_requests_total", outcome="cancelled") == before + 2


def test_a_full_queue_is_told_and_empties(clear):
    clear.batch.go.clear()
    first = threading.Thread(
        target=clear.openai.completions.create,
        kwargs={"model": NAME, "prompt": ["x"] * 5, "n": 3, "max_tokens": 1},
    )
    first.start()
    until(lambda: clear.endpoint.worker.under_way == 15)
    found, error = refusal(clear, {"prompt": "x", "n": 2})
    assert (found, error["type"], error["code"]) == (429, "rate_limit_error", "busy")
    held = clear.http.post("/v1/completions", json={"prompt": "x", "n": 2})
    assert held.headers["retry-after"] == "1"
    clear.batch.go.set()
    first.join()
    assert clear.http.post("/v1/completions", json={"prompt": "x", "n": 2}).status_code == 200


def test_a_slow_client_blocks_no_other(clear):
    """It reads nothing of a stream while others get theirs, and then all of it."""
    body = {"prompt": ["x"] * 2, "n": 2, "max_tokens": 120, "stream": True, "logprobs": 20}
    slow = raw(clear, posted("/v1/completions", json.dumps(body).encode(), "Connection: close"))
    for _ in range(5):
        quick = clear.openai.completions.create(model=NAME, prompt="x", max_tokens=BYTES)
        assert quick.choices[0].text == SAID
    until(lambda: metric(clear, "moejax_running_texts") == 0)  # its slots are free, unread
    parts = []
    while part := slow.recv(65536):
        parts.append(part)
    assert b"data: [DONE]" in b"".join(parts)
    slow.close()


def test_a_large_body_is_refused(served):
    for headers, body in (
        (["Content-Length: 99999999"], b""),
        (["Transfer-Encoding: chunked"], b"fffff\r\n" + b"x" * 0xFFFFF + b"\r\n"),
    ):
        head = ["POST /v1/completions HTTP/1.1", "Host: localhost", *headers]
        connection = raw(served, "\r\n".join(head) + "\r\n\r\n")
        try:
            for _ in range(BODY_BYTES // 0xFFFFF + 2 if body else 0):
                connection.sendall(body)
        except ConnectionError:  # it has its answer
            pass
        assert connection.recv(100).startswith(b"HTTP/1.1 413")
        connection.close()


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://[evil"},
    ],
)
def test_other_sites_are_refused(served, headers):
    for path in ("/v1/models", "/metrics"):
        found = served.http.get(path, headers=headers)
        assert (found.status_code, found.json()["error"]["code"]) == (403, "wrong_host")
    assert refusal(served, {"prompt": "x"}, **headers)[0] == 403


@pytest.mark.parametrize("origin", ["http://localhost:3000", "http://127.0.0.1", "http://[::1]:5"])
def test_pages_of_this_machine_may_ask(served, origin):
    assert served.http.get("/v1/models", headers={"Origin": origin}).status_code == 200


def test_unknown_routes_and_methods_are_told(served):
    for method, path, status in (("GET", "/v1", 404), ("GET", "/v1/completions", 405)):
        found = served.http.request(method, path)
        assert found.status_code == status
        assert "POST /v1/completions" in found.json()["error"]["message"]


def test_an_api_key_is_asked_for():
    with serving(Scripted(), api_key="s3cret-key") as found:
        assert found.ready.wait(10)
        assert found.openai.completions.create(model=NAME, prompt="x").choices[0].text
        lower = {"Authorization": "bearer s3cret-key"}  # schemes of HTTP ignore case
        assert found.http.post("/v1/completions", json={"prompt": "x"}, headers=lower).is_success
        for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret-key"}):
            status, error = refusal(found, {"prompt": "x"}, **given)
            assert (status, error["type"]) == (401, "authentication_error")
            assert found.http.get("/metrics", headers=given).status_code == 401
            assert found.http.get("/health", headers=given).status_code == 200


def test_an_answer_that_takes_long_to_build_holds_up_nobody(monkeypatch):
    building, choice = threading.Event(), completions.choice

    def slow(*arguments):
        building.set()
        time.sleep(2)
        return choice(*arguments)

    monkeypatch.setattr(completions, "choice", slow)
    with serving(Scripted()) as found, ThreadPoolExecutor() as pool:
        assert found.ready.wait(10)
        answer = pool.submit(found.http.post, "/v1/completions", json={"prompt": "x"})
        assert building.wait(10)
        assert found.http.get("/health").status_code == 200
        assert not answer.done()
        assert answer.result(10).is_success


def test_no_request_is_taken_before_programs_are_compiled():
    compiled = threading.Event()
    with serving(Scripted(), warm_up=lambda batch: compiled.wait(10), chat=False) as found:
        until(lambda: found.http.get("/health").status_code == 503)
        assert found.http.get("/health").json() == {"status": "compiling"}
        status, error = refusal(found, {"prompt": "x"})
        assert (status, error["code"]) == (503, "not_ready")
        assert error["message"].startswith("The server is compiling. ")
        compiled.set()
        assert found.ready.wait(10)
        assert metric(found, "moejax_requests_total", outcome="not_ready") == 1
        assert metric(found, "moejax_requests_total", outcome="failed") == 0
        assert found.http.get("/health").status_code == 200
        status, error = refusal(found, CHAT, "/v1/chat/completions")
        assert (status, error["code"]) == (400, "no_chat_template")
        assert error["message"] == (
            "This model has no chat template, so /v1/chat/completions is off. Use /v1/completions."
        )


def test_the_end_waits_for_texts_and_takes_no_others():
    with serving(Scripted(pace=0.01)) as found:
        assert found.ready.wait(10)
        stream = found.openai.completions.create(
            model=NAME, prompt="x", max_tokens=BYTES, stream=True
        )
        pieces = [next(stream).choices[0].text]
        found.server.stop()
        until(lambda: found.http.get("/health").json() == {"status": "stopping"})
        assert refusal(found, {"prompt": "x"})[0] == 503
        pieces += [chunk.choices[0].text for chunk in stream]
        assert "".join(pieces) == SAID
    assert found.found == {"code": 0}


def test_texts_that_the_grace_does_not_suffice_for_end_with_an_error():
    with serving(Scripted(pace=0.01), grace=0.1) as found:
        assert found.ready.wait(10)
        answers = []

        def ask():
            with pytest.raises(openai.InternalServerError) as error:
                found.openai.completions.create(model=NAME, prompt="x", max_tokens=100)
            answers.append(error.value.status_code)

        whole = threading.Thread(target=ask)
        whole.start()
        stream = found.openai.completions.create(
            model=NAME, prompt="x", max_tokens=100, stream=True
        )
        next(stream)
        until(lambda: found.batch.running == 2)
        found.server.stop()
        with pytest.raises(openai.APIError, match=r"text is not finished\. The server stops"):
            list(stream)
        whole.join()
        assert answers == [503]
    assert found.found == {"code": 0}


def test_an_error_of_the_batch_ends_the_server():
    with serving(Scripted()) as found:
        assert found.ready.wait(10)
        found.batch.broken = True
        with pytest.raises(openai.InternalServerError, match="The server failed"):
            found.openai.completions.create(model=NAME, prompt="x")
        found.thread.join(10)
    assert str(found.found["error"]) == "the device is gone"


def test_an_address_that_cannot_be_used_is_told(served):
    for host, port in (served.address[:2], ("203.0.113.7", 0), ("no.such.invalid", 0)):
        with pytest.raises(InputError, match=rf"cannot listen\. {host}:{port}: "):
            listen(host, port)


@pytest.mark.slow
def test_a_thousand_connections_get_their_texts():
    count = 1000
    with serving(Scripted(slots=64), texts=count) as found:
        assert found.ready.wait(10)
        body = json.dumps({"prompt": "x", "max_tokens": BYTES, "stream": True}).encode()
        sent = posted("/v1/completions", body, "Connection: close")
        begin = time.monotonic()
        connections = [raw(found, sent) for _ in range(count)]
        done = 0
        for connection in connections:
            parts = []
            while part := connection.recv(65536):
                parts.append(part)
            done += b"".join(parts).count(b"[DONE]")
            connection.close()
        assert done == count
        assert time.monotonic() - begin < 60
