"""Texts that a model drew, with the log probabilities and the experts of their tokens.

Letters: T tokens of a prompt and its text, L layers with experts, K experts chosen per token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from moejax.data.routing import FORMAT, FREE
from moejax.errors import InputError
from moejax.serve.batch import Batch, Request, Token, news
from moejax.serve.sampling import Sampling
from moejax.serve.texts import Decode, GrowingText


@dataclass
class Sample:
    """A prompt and the text that continues it.

    Log probabilities are of the whole vocabulary and at temperature 1, as in a loss.

    Attributes:
      prompt_ids: ids of the prompt.
      ids: ids that continue it, without the one that ended it. Where a stop string begins inside a
        token, that token is the last.
      logprobs: log probability of each of `ids`.
      ended: "stop" if an id or a stop string ended the text, "length" if it has as many tokens as
        it may.
      text: `ids` as text, up to a stop string.
      prompt_logprobs: log probability of each id of the prompt behind its first, if asked for.
      expert_TLK: the experts that each token of prompt and text chose in each layer with experts,
        in the order of layers and of scores, if asked for. They are -1 for the last token if the
        model did not run on it: the text ended by its length, or inside that token.
    """

    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ended: str = ""
    text: str = ""
    prompt_logprobs: list[float] = field(default_factory=list)
    expert_TLK: np.ndarray | None = None

    def cut(self, tokens: int) -> None:
        """Leaves only so many tokens of the text: those before a stop string."""
        del self.ids[tokens:], self.logprobs[tokens:]
        if self.expert_TLK is not None:
            self.expert_TLK = self.expert_TLK[: len(self.prompt_ids) + tokens]


def draw_samples(
    batch: Batch,
    requests: Sequence[Request],
    ends: Callable[[int, Token], bool] | None = None,
) -> list[Sample]:
    """Returns a sample of each request, without its text. All processes call it alike.

    Args:
      ends: is given each token, with its request's number; returns whether the text ends with it.
    Raises:
      InputError: if a slot has no room for a text.
      RunError: if logits are not finite.
    """
    samples = [Sample(list(request.ids)) for request in requests]
    experts: list[list[np.ndarray]] = [[] for _ in requests]
    for number, event in news(batch, requests, ends):
        sample = samples[number]
        sample.ids += [token.id for token in event.tokens]
        sample.logprobs += [token.logprob for token in event.tokens]
        sample.prompt_logprobs += [token.logprob for token in event.scored]
        sample.ended = event.ended or ""
        experts[number] += event.experts
    for sample, parts in zip(samples, experts, strict=True):
        if parts:
            sample.expert_TLK = _joined(parts, len(sample.prompt_ids) + len(sample.ids))
    return samples


def draw_texts(
    batch: Batch,
    requests: Sequence[Request],
    decode: Decode,
    stops: Sequence[str] = (),
    grown: Callable[[int, str], None] | None = None,
) -> list[Sample]:
    """Returns a sample of each request, with its text, which ends before a stop string.

    Args:
      decode: ids to text.
      grown: is given the number of a request and the characters that its text gained.
    """
    growing = [GrowingText(decode, request.ids, stops) for request in requests]
    texts = [""] * len(requests)

    def add(number: int, characters: str) -> None:
        texts[number] += characters
        if grown is not None:
            grown(number, characters)

    def ends(number: int, token: Token) -> bool:
        add(number, growing[number].add(token.id))
        return growing[number].stopped

    samples = draw_samples(batch, requests, ends)
    for number, sample in enumerate(samples):
        add(number, growing[number].end())
        sample.text = texts[number]
        if growing[number].stopped:
            sample.ended = "stop"
        sample.cut(growing[number].kept)
    return samples


def _joined(parts: list[np.ndarray], tokens: int) -> np.ndarray:
    """Joins the experts of tokens; the last one may be missing."""
    expert_TLK = np.concatenate(parts)
    missing = [(0, tokens - len(expert_TLK)), (0, 0), (0, 0)]
    return np.pad(expert_TLK, missing, constant_values=FREE)


def check_routing_file(path: str, has_experts: bool) -> None:
    """Checks that the routing of a model can be written to a file.

    Raises:
      InputError: if not.
    """
    if not has_experts:
        raise InputError(
            "`--routing` has no effect. The model has no experts, so every token takes the same "
            "way. Leave it out."
        )
    if Path(path).suffix != ".npz" or not Path(path).absolute().parent.is_dir():
        raise InputError(
            f"routing cannot be written. Got --routing {path}. It must be the name of a .npz file "
            f"in a folder that is there. Choose another name, or make the folder."
        )


def write_routing(
    path: str, samples: Sequence[Sample], *, layers: Sequence[int], num_experts: int
) -> None:
    """Writes tokens and their experts as docs/formats/routing.md describes it.

    Args:
      layers: numbers of the layers with experts, from 0.
    """
    ids = [np.array([*sample.prompt_ids, *sample.ids], np.int32) for sample in samples]
    arrays: dict[str, Any] = {
        "format": np.int32(FORMAT),
        "num_experts": np.int32(num_experts),
        "layer_L": np.array(layers, np.int32),
        "tokens_N": np.array([len(own) for own in ids], np.int32),
        "prompt_tokens_N": np.array([len(sample.prompt_ids) for sample in samples], np.int32),
        "id_T": np.concatenate(ids),
        "expert_TLK": np.concatenate([sample.expert_TLK for sample in samples]),
    }
    with Path(path).open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def each(given: Any, count: int, name: str) -> list[Any]:
    """Returns one value for each prompt."""
    if not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        raise InputError(
            f"{name} do not fit the prompts. Got {len(given)} {name} for {count} prompts. There is "
            f"one for all, or one for each. Change their number."
        )
    return list(given)


def check_counts(most: list[int], rules: list[Sampling], n: int) -> None:
    """Checks the numbers of tokens and of samples."""
    for name, numbers in (("tokens", most), ("n", [n])):
        for number in numbers:
            if not hasattr(number, "__index__") or number < 1:
                raise InputError(
                    f"`{name}` is out of range. Got {number!r}. It is a whole number, at least 1. "
                    f"Change it."
                )
    if n > 1 and any(rule.temperature == 0 for rule in rules):
        raise InputError(
            f"`n` has no effect. Got {n} at temperature 0, where all samples of a prompt are the "
            f"same. Set a temperature, or leave `n` out."
        )
