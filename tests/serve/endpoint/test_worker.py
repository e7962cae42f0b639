"""What processes tell each other, so that all make the same calls of their batches."""

import queue
import threading

from moejax.runtime.processes import Processes
from moejax.serve.batch import Request
from moejax.serve.endpoint.worker import follow
from moejax.serve.sampling import Sampling
from tests.serve.endpoint import serving as serving_module
from tests.serve.endpoint.serving import NAME, SAID, Scripted, serving, until


class Linked(Processes):
    """One of two processes, which are threads here."""

    def __init__(self, index, posted):
        super().__init__(index, 2)
        self._posted = posted

    def send(self, name, value):
        self._posted.put((name, value))

    def receive(self, name):
        found, value = self._posted.get(timeout=20)
        assert found == name, "each message is for one step"
        return value


class Recorded(Scripted):
    """Notes the calls that are made of it."""

    def __init__(self):
        super().__init__(pace=0.002)  # so that a cancellation comes before the end
        self.calls = []

    def submit(self, request):
        self.calls.append(request)
        return super().submit(request)

    def cancel(self, key):
        self.calls.append(key)
        super().cancel(key)

    def step(self):
        self.calls.append("step")
        return super().step()


def test_the_other_processes_make_the_same_calls(monkeypatch):
    posted, other, codes = queue.Queue(), Recorded(), []
    monkeypatch.setattr(serving_module, "ALONE", Linked(0, posted))

    def run():
        codes.append(follow(other, Linked(1, posted), lambda batch: batch.calls.append("warm")))

    thread = threading.Thread(target=run)
    thread.start()
    first = Recorded()
    with serving(first, warm_up=lambda batch: batch.calls.append("warm")) as found:
        assert found.ready.wait(10)
        body = {"model": NAME, "prompt": ["x", [1, 2]], "n": 2, "logprobs": 2}
        found.http.post("/v1/completions", json={**body, "max_tokens": 100, "stop": "e"})
        found.openai.completions.create(
            model=NAME, prompt="x", top_p=0.5, seed=4, max_tokens=len(SAID.encode())
        )
        until(lambda: found.batch.running == 0)
    thread.join(20)
    assert codes == [0]
    assert first.calls == other.calls
    assert first.calls[0] == "warm"
    last = next(call for call in reversed(first.calls) if isinstance(call, Request))
    bytes_said = len(SAID.encode())
    rule = Sampling(1.0, None, 0.5, 0.0, 4)
    assert last == Request([256, 120], bytes_said, rule, frozenset([256]))
    assert {1, 2, 3, 4} & {call for call in first.calls if isinstance(call, int)}
