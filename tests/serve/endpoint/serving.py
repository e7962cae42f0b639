"""Servers in a thread of the tests: of a model, or of a batch that says a known text."""

import contextlib
import socket
import threading
import time
from collections import deque
from types import SimpleNamespace

import httpx
import openai

from moejax.data.prepare.chat_template import ChatTemplate
from moejax.data.tokenizer import ByteTokenizer
from moejax.runtime.processes import ALONE
from moejax.serve.batch import Batch, Event, Token
from moejax.serve.endpoint.app import Endpoint
from moejax.serve.endpoint.jobs import ServedModel
from moejax.serve.endpoint.metrics import Metrics
from moejax.serve.endpoint.server import Server, listen, url_of
from moejax.serve.endpoint.worker import Worker
from moejax.serve.prompts import ChatPrompts, Vocabulary
from moejax.serve.texts import TokenTexts

NAME, POSITIONS, VOCABULARY = "bytes", 128, 264
TEMPLATE = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
SAID = "one \u20ac two \U0001f600 three. "


class Scripted(Batch):
    """A batch without a model: every text goes on with the bytes of SAID, over and over.

    Behind a "z" it begins at its second word.

    Attributes:
      go: while it is not set, steps wait.
      log: number of texts that ran in each step.
    """

    def __init__(self, slots=4, pace=0.0):
        self.slots, self.pace, self.texts, self.queue = slots, pace, {}, deque()
        self.go, self.log, self.next, self.broken = threading.Event(), [], 0, False
        self.go.set()

    @property
    def running(self):
        return len(self.texts)

    @property
    def waiting(self):
        return len(self.queue)

    def submit(self, request):
        self.next += 1
        self.queue.append((self.next, request))
        return self.next

    def cancel(self, key):
        self.texts.pop(key, None)
        self.queue = deque(pair for pair in self.queue if pair[0] != key)

    def step(self):
        self.go.wait()
        time.sleep(self.pace)
        if self.broken:
            raise RuntimeError("the device is gone")
        while self.queue and len(self.texts) < self.slots:
            key, request = self.queue.popleft()
            self.texts[key] = [request, 0]
        self.log.append(len(self.texts))
        return [self._event(key, *text) for key, text in list(self.texts.items())]

    def _event(self, key, request, grown):
        said = SAID.encode()
        if request.ids[-1] == ord("z"):
            said = said[8:] + said[:8]
        token = Token(said[grown % len(said)], -0.5, ((said[0], -0.25),) * request.likeliest)
        scored = ()
        if request.scored and not grown:
            scored = tuple(Token(id, -1.0) for id in request.ids[1:])
        if list(request.ids[-3:]) == list(b"nan"):
            del self.texts[key]
            return Event(key, (), (), "not finite")
        if not request.tokens:
            del self.texts[key]
            return Event(key, (), scored, "length")
        self.texts[key][1] += 1
        ended = "length" if grown + 1 == request.tokens else None
        if ended:
            del self.texts[key]
        return Event(key, (token,), scored, ended)


def served_model(chat=True, template=TEMPLATE, **changes):
    """What a server knows of a model of bytes."""
    tokenizer = ByteTokenizer()
    values = {
        "name": NAME,
        "vocabulary": Vocabulary(tokenizer, None, frozenset([256]), 257, None),
        "token_texts": TokenTexts(tokenizer),
        "chat": ChatPrompts(ChatTemplate(template, "test"), None) if chat else None,
        "vocab_size": VOCABULARY,
        "positions": POSITIONS,
        "texts": 16,
    }
    return ServedModel(**(values | changes))


@contextlib.contextmanager
def serving(batch, *, api_key=None, grace=5.0, warm_up=lambda batch: None, places=None, **changes):
    """A server at a free port, and clients of it."""
    model, metrics = served_model(**changes), Metrics(expert_slots=places is not None)
    worker = Worker(batch, ALONE, metrics, most=model.texts, places=places)
    endpoint = Endpoint(model, worker, metrics, api_key=api_key, loopback_only=True)
    opened = listen("127.0.0.1", 0)
    server = Server(endpoint, opened, grace=grace)
    ready, found = threading.Event(), {}

    def run():
        try:
            found["code"] = server.run(warm_up, ready.set)
        except BaseException as error:
            found["error"] = error

    thread = threading.Thread(target=run)
    thread.start()
    url = url_of(opened)
    try:
        with (
            httpx.Client(base_url=url.removesuffix("/v1"), timeout=30) as http,
            openai.OpenAI(base_url=url, api_key=api_key or "none", max_retries=0) as client,
        ):
            yield SimpleNamespace(
                url=url,
                http=http,
                openai=client,
                server=server,
                endpoint=endpoint,
                batch=batch,
                ready=ready,
                found=found,
                thread=thread,
                address=opened.getsockname(),
            )
    finally:
        if thread.is_alive():
            with contextlib.suppress(RuntimeError, AttributeError):
                server.stop()
        thread.join(20)
        assert not thread.is_alive()


def metric(served, name, **labels):
    """The value of a number in /metrics."""
    wanted = name + (
        "{" + ",".join(f'{k}="{v}"' for k, v in labels.items()) + "}" if labels else ""
    )
    for line in served.http.get("/metrics").text.splitlines():
        if line.rpartition(" ")[0] == wanted:
            return float(line.rpartition(" ")[2])
    raise AssertionError(wanted)


def until(holds, seconds=10):
    """Waits until something holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come to hold"
        time.sleep(0.01)


def raw(served, text):
    """A connection that has sent some bytes."""
    connection = socket.create_connection(served.address[:2], timeout=30)
    connection.sendall(text if isinstance(text, bytes) else text.encode())
    return connection


def posted(path, body, *headers):
    """A whole request as bytes."""
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
