"""moejax: a JAX trainer for Mixture-of-Experts language models at the speed the network allows.

Read in this order: `config`, `layout`, `comm`, `moe`, `model`, `step`, `train`; `plan` and `aot`
stand beside. From Python: `load_config`, `run_training`, `load_checkpoint`, `load_model`.
"""

from typing import TYPE_CHECKING, Any

from moejax.config.load import load_config
from moejax.version import __version__ as __version__

if TYPE_CHECKING:
    from moejax.api import run_training as run_training
    from moejax.checkpoint.load import load_checkpoint as load_checkpoint
    from moejax.serve.model import load_model as load_model

__all__ = ["load_checkpoint", "load_config", "load_model", "run_training"]


def __getattr__(name: str) -> Any:
    """Imports functions that need JAX when they are first used: other commands start at once."""
    if name == "run_training":
        from moejax.api import run_training

        return run_training
    if name == "load_checkpoint":
        from moejax.checkpoint.load import load_checkpoint

        return load_checkpoint
    if name == "load_model":
        from moejax.serve.model import load_model

        return load_model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
