"""Draws the next token of each row from its logits.

Per device, or anywhere. Legend: B rows, V vocabulary.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from moejax.annotations import Array, Bool, Float, Int
from moejax.errors import InputError

NOT_FINITE = -1  # in place of a token, where no logit is the largest


@dataclass(frozen=True)
class Sampling:
    """The rule by which tokens are drawn. Static: each rule compiles its own program.

    Attributes:
      temperature: divides the logits; 0: the largest is taken, and nothing is drawn.
      top_k: number of the likeliest tokens that are kept; None: all.
      top_p: then only the likeliest tokens are kept that together have this probability; 1: all.
      seed: with a row's number and the position it decides the draw, on any mesh and in any batch.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def check(self) -> None:
        """Checks ranges.

        Raises:
          InputError: names the option of the command.
        """
        rules = {
            "temperature": (self.temperature >= 0, "It is at least 0, and 0 draws nothing"),
            "top-k": (self.top_k is None or self.top_k >= 1, "It is at least 1"),
            "top-p": (0 < self.top_p <= 1, "It is a probability above 0, at most 1"),
            "seed": (0 <= self.seed < 2**32, "It is at least 0 and below 2^32"),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                value = getattr(self, name.replace("-", "_"))
                raise InputError(f"`--{name}` is out of range. Got {value}. {rule}. Change it.")
        if self.temperature == 0 and (self.top_k is not None or self.top_p < 1):
            raise InputError(
                "`--top-k` and `--top-p` have no effect. `--temperature` is 0. The likeliest token "
                "is taken then. Leave them out, or set a temperature."
            )


def draw(
    logit_BV: Float[Array, "B V"],
    row_B: Int[Array, " B"],
    position_B: Int[Array, " B"],
    sampling: Sampling,
    allowed: int,
) -> Int[Array, " B"]:
    """Returns a token of each row, `NOT_FINITE` where logits are not finite.

    Args:
      row_B: number of each row's prompt.
      position_B: position of the token that is drawn.
      allowed: ids from this one on are never drawn: the vocabulary's padding.
    """
    logit_BV = jnp.where(jnp.arange(logit_BV.shape[1]) < allowed, logit_BV, -jnp.inf)
    finite_B = jnp.isfinite(jnp.max(logit_BV, axis=1))
    if sampling.temperature > 0:
        scaled_BV = logit_BV / sampling.temperature
        scaled_BV = jnp.where(kept(scaled_BV, sampling.top_k, sampling.top_p), scaled_BV, -jnp.inf)
        # The largest of logits and Gumbel noise is a draw from their softmax.
        noise = jax.vmap(lambda key: jax.random.gumbel(key, logit_BV.shape[1:]))
        seeded = jax.random.key(sampling.seed)
        fold_in = jax.random.fold_in
        keys_B = jax.vmap(lambda r, p: fold_in(fold_in(seeded, r), p))(row_B, position_B)
        logit_BV = scaled_BV + noise(keys_B)
    token_B = jnp.argmax(logit_BV, axis=1).astype(jnp.int32)
    return jnp.where(finite_B, token_B, NOT_FINITE)


def kept(logit_BV: Float[Array, "B V"], top_k: int | None, top_p: float) -> Bool[Array, "B V"]:
    """Returns which tokens are kept: the top_k likeliest, and of them the likeliest of mass top_p.

    Tokens are ordered by probability, equal ones by id. A token is kept if those before it have
    less than top_p of the mass of the top_k, so that the likeliest always is.
    """
    V = logit_BV.shape[1]
    if (top_k is None or top_k >= V) and top_p >= 1:
        return jnp.ones(logit_BV.shape, bool)
    order_BV = jnp.argsort(-logit_BV, axis=1, stable=True)
    sorted_BV = jnp.take_along_axis(logit_BV, order_BV, axis=1)
    within_V = jnp.arange(V) < (V if top_k is None else top_k)
    chance_BV = jax.nn.softmax(jnp.where(within_V, sorted_BV, -jnp.inf), axis=1)
    before_BV = jnp.cumsum(chance_BV, axis=1) - chance_BV
    # A sum of rounded probabilities may pass 1 before the last.
    keep_BV = within_V & (before_BV < (top_p if top_p < 1 else jnp.inf))
    place_BV = jnp.argsort(order_BV, axis=1)
    return jnp.take_along_axis(keep_BV, place_BV, axis=1)
