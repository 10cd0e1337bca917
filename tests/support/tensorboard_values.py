"""Reads the event files that `log.tensorboard` leaves, without TensorBoard."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from tensorboardX.proto.event_pb2 import Event


def tensorboard_values(folder: Path) -> dict[str, Any]:
    """The last value of each tag in a folder's one file: records of a length, its checksum, the event, its checksum."""
    (path,) = folder.iterdir()
    data, values = path.read_bytes(), dict[str, Any]()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        values |= {value.tag: value for value in Event.FromString(data[12 : 12 + length]).summary.value}
        data = data[16 + length :]
    return values
