"""moejax: a JAX trainer for Mixture-of-Experts language models at the speed the network allows.

Read in this order: `config`, `layout`, `comm`, `moe`, `model`, `step`, `train`; `plan` and `aot`
stand beside. From Python: `load_config`, `run_training`, `load_checkpoint`, `Engine`,
`Sampling`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from moejax.config.load import load_config
from moejax.version import __version__ as __version__

if TYPE_CHECKING:
    from moejax.api import run_training as run_training
    from moejax.checkpoint.load import load_checkpoint as load_checkpoint
    from moejax.serve.engine import Engine as Engine
    from moejax.serve.sampling import Sampling as Sampling

_LATER = {
    "run_training": "moejax.api",
    "load_checkpoint": "moejax.checkpoint.load",
    "Engine": "moejax.serve.engine",
    "Sampling": "moejax.serve.sampling",
}

__all__ = ["Engine", "Sampling", "load_checkpoint", "load_config", "run_training"]


def __getattr__(name: str) -> Any:
    """Imports what needs JAX when it is first used: other commands start at once."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)
