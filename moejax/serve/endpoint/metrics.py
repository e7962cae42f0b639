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


class Metrics:
    """What a server counts. Only the event loop's thread writes."""

    def __init__(self) -> None:
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

    def text(self) -> bytes:
        """Returns all numbers."""
        return generate_latest(self._registry)
