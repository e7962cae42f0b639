"""Draws the next token of each row from its logits.

Per device, or anywhere. Legend: R rows, V vocabulary, N likeliest tokens that are reported.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moejax.annotations import Array, Bool, Float, Int
from moejax.errors import InputError

NOT_FINITE = -1  # in place of a token, where no logit is the largest


@dataclass(frozen=True)
class Sampling:
    """The rule by which the tokens of a text are drawn.

    Attributes:
      temperature: divides the logits; 0: the largest is taken, and nothing is drawn.
      top_k: number of the likeliest tokens that are kept; None: all.
      top_p: then only the likeliest tokens are kept that together have this probability; 1: all.
      min_p: then only tokens are kept that have this share of the likeliest one's probability.
      seed: with a text's number and the position it decides the draw, on any mesh and in any batch.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    @property
    def filters(self) -> bool:
        """Whether some tokens are never drawn."""
        return self.top_k is not None or self.top_p < 1 or self.min_p > 0

    def check(self) -> None:
        """Checks ranges.

        Raises:
          InputError: names the option of the command.
        """
        rules = {
            "temperature": (0 <= self.temperature < math.inf, "It is at least 0, 0 draws nothing"),
            "top-k": (
                self.top_k is None or _is_whole(self.top_k, 1, 2**31),
                "It is a whole number, at least 1 and below 2^31",
            ),
            "top-p": (0 < self.top_p <= 1, "It is a probability above 0, at most 1"),
            "min-p": (0 <= self.min_p <= 1, "It is a share, 0 to 1"),
            "seed": (
                _is_whole(self.seed, 0, 2**32),
                "It is a whole number, at least 0 and below 2^32",
            ),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                value = getattr(self, name.replace("-", "_"))
                raise InputError(f"`--{name}` is out of range. Got {value}. {rule}. Change it.")
        if self.temperature == 0 and self.filters:
            raise InputError(
                "`--top-k`, `--top-p` and `--min-p` have no effect. `--temperature` is 0. The "
                "likeliest token is taken then. Leave them out, or set a temperature."
            )


def _is_whole(number: Any, least: int, end: int) -> bool:
    return hasattr(number, "__index__") and least <= number < end


GREEDY = Sampling()


class Draws(NamedTuple):
    """The rule of each row's draw, as arrays."""

    temperature_R: Any  # 0: the likeliest token
    top_k_R: Any  # V or more: all
    top_p_R: Any
    min_p_R: Any
    seed_R: Any
    number_R: Any  # number of the row's text
    position_R: Any  # position of the token that is drawn


class Drawn(NamedTuple):
    """A token of each row, `NOT_FINITE` where logits are not finite, and log probabilities.

    The likeliest tokens are in order; there may be none.
    """

    token_R: Any
    logprob_R: Any
    likeliest_RN: Any
    logprob_RN: Any


def draw(
    logit_RV: Float[Array, "R V"], draws: Draws, *, kind: str, allowed: int, likeliest: int
) -> Drawn:
    """Draws a token of each row.

    Args:
      kind: "greedy", where all temperatures are 0; "all", where no rule filters; or "filtered".
      allowed: ids from this one on are never drawn: the vocabulary's padding.
      likeliest: N.
    """
    allowed_RV = jnp.where(jnp.arange(logit_RV.shape[1]) < allowed, logit_RV, -jnp.inf)
    token_R = jnp.argmax(allowed_RV, axis=1).astype(jnp.int32)
    is_finite_R = jnp.isfinite(jnp.max(allowed_RV, axis=1))
    if kind != "greedy":
        is_drawn_R = draws.temperature_R > 0
        scaled_RV = allowed_RV / jnp.where(is_drawn_R, draws.temperature_R, 1)[:, None]
        if kind == "filtered":
            kept_RV = kept(scaled_RV, draws.top_k_R, draws.top_p_R, draws.min_p_R)
            scaled_RV = jnp.where(kept_RV, scaled_RV, -jnp.inf)
        drawn_R = jnp.argmax(scaled_RV + _noise(draws, logit_RV.shape[1]), axis=1)
        token_R = jnp.where(is_drawn_R, drawn_R.astype(jnp.int32), token_R)
    logprobs = log_probabilities(logit_RV, token_R, allowed=allowed, likeliest=likeliest)
    return Drawn(jnp.where(is_finite_R, token_R, NOT_FINITE), *logprobs)


def _noise(draws: Draws, vocabulary: int) -> Float[Array, "R V"]:
    """Gumbel noise: the largest of logits and it is a draw from their softmax."""

    def of_row(seed: jax.Array, number: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), number), position)
        return jax.random.gumbel(key, (vocabulary,))

    return jax.vmap(of_row)(draws.seed_R, draws.number_R, draws.position_R)


def log_probabilities(
    logit_RV: Float[Array, "R V"], token_R: Int[Array, " R"], *, allowed: int, likeliest: int
) -> tuple[Float[Array, " R"], Int[Array, "R N"], Float[Array, "R N"]]:
    """Returns log probabilities of tokens, and the likeliest tokens with theirs.

    They are of the whole vocabulary, as in a loss: without temperature and filters.
    """
    total_R1 = jax.nn.logsumexp(logit_RV, axis=1, keepdims=True)
    own_R1 = jnp.take_along_axis(logit_RV, token_R[:, None], axis=1) - total_R1
    top_RN, token_RN = jax.lax.top_k(logit_RV[:, :allowed], min(likeliest, allowed))
    return own_R1[:, 0], token_RN, top_RN - total_R1


def kept(
    logit_RV: Float[Array, "R V"],
    top_k_R: Int[Array, " R"],
    top_p_R: Float[Array, " R"],
    min_p_R: Float[Array, " R"],
) -> Bool[Array, "R V"]:
    """Returns which tokens are kept: the top_k likeliest, of them the likeliest of mass top_p.

    Of these only those stay that have min_p of the likeliest one's probability. Tokens are ordered
    by probability, equal ones by id. A token is kept if those before it have less than top_p of the
    mass of the top_k, so that the likeliest always is.
    """
    order_RV = jnp.argsort(-logit_RV, axis=1, stable=True)
    sorted_RV = jnp.take_along_axis(logit_RV, order_RV, axis=1)
    within_RV = jnp.arange(logit_RV.shape[1]) < top_k_R[:, None]
    chance_RV = jax.nn.softmax(jnp.where(within_RV, sorted_RV, -jnp.inf), axis=1)
    before_RV = jnp.cumsum(chance_RV, axis=1) - chance_RV
    # A sum of rounded probabilities may pass 1 before the last.
    most_R1 = jnp.where(top_p_R < 1, top_p_R, jnp.inf)[:, None]
    keep_RV = within_RV & (before_RV < most_R1)
    keep_RV = keep_RV.at[:, 0].set(True)  # top_p may be too small for float32
    keep_RV &= chance_RV >= min_p_R[:, None] * chance_RV[:, :1]
    return jnp.take_along_axis(keep_RV, jnp.argsort(order_RV, axis=1), axis=1)
