"""Writes TensorBoard's event files: numbers by tag and step.

Events are written at once in the caller's thread. tensorboardX's own writer uses a thread: a full
disk ends it unnoticed, and the run then waits forever for space in its queue.
"""

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.record_writer import masked_crc32c

from moejax.errors import StorageFullError, writing


class Board:
    """Adds events to a new file of a directory."""

    def __init__(self, directory: Path):
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self.path = directory / name
        with writing(self.path):
            directory.mkdir(parents=True, exist_ok=True)
            # Without a buffer, closing has nothing left to write.
            self._file = self.path.open("ab", buffering=0)
        try:
            self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        except StorageFullError:
            self.close()
            raise

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Adds a number for each tag."""
        values_of = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        if values_of:
            self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=values_of)))

    def _write(self, event: Event) -> None:
        left = record(event.SerializeToString())
        with writing(self.path):
            while left:
                left = left[self._file.write(left) :]

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def record(data: bytes) -> bytes:
    """Returns one record of a TFRecord file: length, data, and a checksum of each."""
    length = struct.pack("<Q", len(data))
    sums = [struct.pack("<I", masked_crc32c(part)) for part in (length, data)]
    return length + sums[0] + data + sums[1]
