"""Names that Python config files import; the code is in `moejax.config.load`."""

from moejax.config.load import default_config, load_config

__all__ = ["default_config", "load_config"]
