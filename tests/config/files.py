"""What tests of config files share: a config in Python, and the error of one that is refused."""

import pytest

from moejax.config.load import load_config
from moejax.errors import InputError


def error_of(path, *overrides):
    """Returns the message of the InputError that loading raises; always a single line."""
    with pytest.raises(InputError) as caught:
        load_config(path, overrides)
    message = str(caught.value)
    assert message.isprintable(), "a message is one line of printable characters"
    assert len(message) < 600
    return message


def python_config(body):
    return f"""from moejax.settings import default_config
def get_config():
    config = default_config()
    {body}
    return config
"""
