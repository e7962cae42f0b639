import io
import struct
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c

from moejax.errors import StorageFullError
from moejax.train.records.metrics import Board


def events(path):
    """The events of a file, each checked against its two sums."""
    data = path.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        content, end = data[12 : 12 + length], 16 + length
        sums = struct.unpack("<II", data[8:12] + data[12 + length : end])
        assert sums == (masked_crc32c(data[:8]), masked_crc32c(content))
        yield Event.FromString(content)
        data = data[end:]


def test_events_are_there_at_once_and_can_be_read(tmp_path):
    board = Board(tmp_path / "tensorboard")
    board.add(3, {"train/loss": 1.5, "train/skipped": 2})
    board.add(4, {})
    first, event = events(board.path)
    board.close()
    assert first.file_version == "brain.Event:2"
    assert event.step == 3
    values = [(value.tag, value.simple_value) for value in event.summary.value]
    assert values == [("train/loss", 1.5), ("train/skipped", 2.0)]


def test_an_event_that_is_written_in_parts_is_whole(tmp_path):
    board = Board(tmp_path)

    class Slow:
        """A file that takes three bytes at a time, as a disk that is nearly full or a pipe."""

        def __init__(self, file):
            self.file, self.close = file, file.close

        def write(self, data):
            return self.file.write(data[:3])

    board._file = Slow(board._file)
    board.add(3, {"train/loss": 1.5})
    board.close()
    *_, event = events(board.path)
    assert event.summary.value[0].simple_value == 1.5


def test_a_full_disk_ends_the_caller_and_not_a_thread(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "open", lambda self, *_, **__: io.FileIO("/dev/full", "a"))
    with pytest.raises(StorageFullError, match="tfevents"):
        Board(tmp_path)
