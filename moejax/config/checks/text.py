"""Texts that the rules share: refusals, and suggestions of sizes."""

from moejax.errors import InputError


def require(holds: bool, message: str) -> None:
    """Raises InputError unless `holds`."""
    if not holds:
        raise InputError(message)


def divisors_text(n: int) -> str:
    """Returns the divisors of `n` as text; if there are many, the smallest ones and `n`."""
    # Sizes have no upper bound, so only small divisors are tried.
    small = [d for d in range(1, min(n, 4096) + 1) if n % d == 0][:12]
    return ", ".join(map(str, small if small[-1] == n else [*small, n]))


def multiples(n: int, step: int) -> str:
    """Returns the multiples of `step` next to `n` as text."""
    below = n // step * step
    return f"{below} or {below + step}" if below else f"{below + step}"
