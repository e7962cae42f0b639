"""The fixture of the tests that write config files."""

import pytest


@pytest.fixture
def config_file(tmp_path, monkeypatch):
    """Writes a config file into the working directory and returns its name."""
    monkeypatch.chdir(tmp_path)

    def write(name, content):
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return name

    return write
