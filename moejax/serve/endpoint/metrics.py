"""Numbers of a server, in the text format of Prometheus."""

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
OUTCOMES = ("done", "cancelled", "refused", "busy", "not_ready", "failed")
PLACES = {
    "moejax_expert_tables": "Times that experts of a layer got other places.",
    "moejax_experts_moved": "Places that got the weights of another expert.",
    "moejax_overflowed_choices": "Choices of experts that went in overflow rounds.",
}


class Metrics:
    """What a server counts. Only the event loop's thread writes."""

    def __init__(self, *, expert_slots: bool = False) -> None:
        """Counts nothing yet.

        Args:
          expert_slots: whether there are slots, whose counts `count_places` takes.
        """
        disable_created_metrics()  # of this process: times at which counters were made
        self._registry = kept = CollectorRegistry()
        self.requests = Counter(
            "moejax_requests", "Requests for texts, by outcome.", ["outcome"], registry=kept
        )
        for outcome in OUTCOMES:
            self.requests.labels(outcome)
        self.prompt_tokens = Counter(
            "moejax_prompt_tokens", "Tokens of prompts that were taken up.", registry=kept
        )
        self.tokens = Counter("moejax_generated_tokens", "Tokens that were drawn.", registry=kept)
        self.running = Gauge("moejax_running_texts", "Texts that have a slot.", registry=kept)
        self.waiting = Gauge("moejax_waiting_texts", "Texts that wait for one.", registry=kept)
        self.first_token = Histogram(
            "moejax_first_token_seconds",
            "From a request to the first token of a text.",
            buckets=SECONDS,
            registry=kept,
        )
        self.next_token = Histogram(
            "moejax_next_token_seconds",
            "Between two tokens of a text.",
            buckets=SECONDS,
            registry=kept,
        )

        slots = PLACES if expert_slots else {}
        self._places = [Counter(name, about, registry=kept) for name, about in slots.items()]
        self._of_places = (0,) * len(PLACES)

    def count_places(self, counts: tuple[int, ...]) -> None:
        """Takes what `Places.counts` says now."""
        for counter, now, before in zip(self._places, counts, self._of_places, strict=True):
            counter.inc(now - before)
        self._of_places = counts

    def text(self) -> bytes:
        """Returns all numbers."""
        return generate_latest(self._registry)
