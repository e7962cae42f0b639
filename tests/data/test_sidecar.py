"""What stands beside a token file is refused unless all of it can be right."""

import subprocess
import sys

import pytest

from moejax.data.sidecar import read_sidecar, sidecar_of
from moejax.errors import InputError
from tests.data.token_files import BegunTokenizer, change, write_marked, write_text

SHA = "0" * 63  # a digit too short
OF_TEXT = [
    {"format_version": "1"},
    {"format_version": True},
    {"format_version": 2},
    {"num_targets": 3},
    {"surplus": 1},
    {"num_tokens": ...},
    {"num_tokens": -3},
    {"num_tokens": 6.0},
    {"num_tokens": 1},
    {"num_bytes": "many"},
    {"num_documents": -1},
    {"eos_id": 257},
    {"vocab_size": 2**31},
    {"dtype": "float32"},
    {"format": "zip"},
    {"format": "array_record", "chunk_tokens": 0},
    {"sha256": 5},
    {"sha256": SHA},
    {"tokenizer_sha256": SHA},
    {"tokenizer": ".."},
    {"tokenizer": "folder\\name"},
    {"tokenizer": "C:name"},
    {"tokenizer": "../../elsewhere.json"},
]
OF_MARKS = [
    {"format_version": 1},
    {"marks_sha256": None},
    {"marks_sha256": SHA},
    {"num_targets": 0},
    {"num_targets": True},
    {"num_targets": 10**6},
    {"target_bytes": "3"},
    {"target_bytes": -1},
]
CHAT = {"template": "", "tokens": {}, "end_ids": []}
OF_BEGINS = [
    {"format_version": 2},
    {"num_targets": None},
    {"bos_id": 10**6},
    {"bos_id": True},
    {"bos_id": 256},
    {"chat": "x"},
    {"chat": {"template": ""}},
    {"chat": CHAT | {"template": 1}},
    {"chat": CHAT | {"tokens": {"bos_token": 1}}},
    {"chat": CHAT | {"tokens": ["bos_token"]}},
    {"chat": CHAT | {"end_ids": [-1]}},
    {"chat": CHAT | {"end_ids": [True]}},
    {"chat": CHAT | {"end_ids": 1}},
]


@pytest.mark.parametrize(
    ("version", "fields"),
    [(n, one) for n, some in enumerate((OF_TEXT, OF_MARKS, OF_BEGINS), 1) for one in some],
)
def test_a_sidecar_with_a_wrong_field_is_refused(tmp_path, version, fields):
    if version == 2:
        path = write_marked(tmp_path, [(b"question", b"answer")])
    else:
        path = write_text(tmp_path, "text", tokenizer=BegunTokenizer() if version == 3 else None)
    assert read_sidecar(path).format_version == version
    change(path, **fields)
    with pytest.raises(InputError, match=r"sidecar is damaged\. .*a\.bin\.json"):
        read_sidecar(path)


def test_a_sidecar_that_is_no_json_object_is_refused(tmp_path):
    path = write_text(tmp_path, "text")
    for content in (b"", b"[]", b'"text"', b"\xff\xfe{}", b"[" * 100_000):
        sidecar_of(path).write_bytes(content)
        with pytest.raises(InputError, match=r"damaged\. .*a\.bin\.json"):
            read_sidecar(path)
    sidecar_of(path).write_bytes(b" " * (2**20 + 1))
    with pytest.raises(InputError, match="too large"):
        read_sidecar(path)
    sidecar_of(path).unlink()
    with pytest.raises(InputError, match=r"a\.bin\.json does not exist"):
        read_sidecar(path)


def test_a_newer_format_asks_for_an_upgrade(tmp_path):
    path = write_text(tmp_path, "text")
    change(path, format_version=4)
    with pytest.raises(InputError, match=r"newer moejax.*4.*up to 3.*Upgrade"):
        read_sidecar(path)


def test_the_sidecar_is_checked_without_asserts(tmp_path):
    path = write_text(tmp_path, "text")
    change(path, tokenizer="../elsewhere.json")
    program = (
        "import pathlib, sys\n"
        "from moejax.data.sidecar import read_sidecar\n"
        "read_sidecar(pathlib.Path(sys.argv[1]))\n"
    )
    command = [sys.executable, "-O", "-c", program, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "InputError: sidecar is damaged" in done.stderr
