"""moejax: a JAX trainer for Mixture-of-Experts language models at the speed the network allows.

Read in this order: `config`, `layout`, `comm`, `moe`, `model`, `step`, `train`; `plan` and `aot`
stand beside.
"""

from moejax.config.load import load_config

__all__ = ["load_config"]
__version__ = "0.1.0"
