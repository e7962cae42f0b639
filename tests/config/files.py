"""What tests of configs share: configs in words and in Python, and the error of a refused one."""

import pytest

from moejax.config.checks import check
from moejax.config.load import load_config, override
from moejax.config.schema import Config
from moejax.errors import InputError


def message_of(run, *args, **options):
    """Returns the message of the InputError that `run` raises; always a single line."""
    with pytest.raises(InputError) as caught:
        run(*args, **options)
    message = str(caught.value)
    assert message.isprintable(), "a message is one line of printable characters"
    assert len(message) < 600
    return message


def error_of(path, *overrides):
    """Returns the message of a config file that is refused."""
    return message_of(load_config, path, overrides)


def settings(words):
    """Returns a config of the defaults and settings such as `mesh.expert=4 mesh.tensor=2`."""
    return override(Config(), words.split())


def cases(table):
    """Reads lines `SETTINGS -> TEXT`, as parameters with the settings for their name."""
    pairs = [line.split(" -> ") for line in table.splitlines() if line.strip()]
    return [pytest.param(words.strip(), said, id=words.strip()) for words, said in pairs]


def assert_refused(words, said):
    """The settings are refused with the parts of a text, which stand between dots."""
    message = message_of(check, settings(words))
    for part in said.split(" ... "):
        assert part in message


def assert_without_effect(words, said):
    """The settings are refused: `NAME: REASON`."""
    name, _, reason = said.partition(": ")
    message = message_of(check, settings(words))
    assert message.startswith(f"`{name}` = ")
    assert " has no effect: " in message
    assert reason in message


def python_config(body):
    return f"""from moejax.settings import default_config
def get_config():
    config = default_config()
    {body}
    return config
"""
