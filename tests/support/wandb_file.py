"""What a training run logged to wandb, read from the file of an offline run.

The file is a log of LevelDB (doc/log_format.md of google/leveldb) behind 7 bytes of wandb's own: blocks of 32 KiB, in
which a record of wandb is whole or in pieces.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

_FILE_HEADER_LEN, _BLOCK_LEN = 7, 32768
_HEADER = struct.Struct("<IHB")  # checksum, length, type
_FULL, _LAST = 1, 4


def read_history(path: Path) -> dict[int, dict[str, Any]]:
    """Return what was logged at each step; the parts of a table and other objects under `key.part`."""
    history: dict[int, dict[str, Any]] = {}
    for data in _records(path.read_bytes()):
        record = Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            history.setdefault(items["_step"], {}).update(items)
    return history


def _records(content: bytes) -> Iterator[bytes]:
    position, pieces = _FILE_HEADER_LEN, []
    while position + _HEADER.size <= len(content):
        left = _BLOCK_LEN - position % _BLOCK_LEN
        if left < _HEADER.size:
            position += left  # no header fits: the block ends in zeros
            continue
        _, length, kind = _HEADER.unpack_from(content, position)
        position += _HEADER.size
        pieces.append(content[position : position + length])
        position += length
        if kind in (_FULL, _LAST):
            yield b"".join(pieces)
            pieces = []
