"""The columns of a prompt's rows as bytes that have each token of its trees once.

verl writes rows: each has all tokens of its path, and `input_ids` repeats `prompts` and `responses`. Here the value of
a row's column is what the row adds to rows that were written before, and says where the rest lies.

Example: rows 7 and 8 of a prompt, with `input_ids` of [1 2 3 4] and [1 2 5]::

    row  value
    7    own elements 1 2 3 4
    8    2 elements of row 7, from its first one on; own element 5

A row is compared with the one written before that shares most tokens with it. It refers to elements at the same places
of the path if they are equal bit for bit, so what is read is what was written, whatever a column holds. References name
the rows that hold the elements themselves: a reader looks them up once.

Integers take as few bytes as their values need; leading zeros, and positions that count up, take none. Values that are
no tensors, as `raw_prompt` and pixels of images, are written once where rows have equal ones.
"""

import pickle
import secrets
import struct
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b
from itertools import accumulate, chain
from typing import Any, NamedTuple, Self, cast

import numpy as np
import torch
from transfer_queue.utils import serial_utils

from rollout_hooks.capture.leaf_shapes import TOKEN_TYPE, num_shared_tokens

MAGIC = b"\x93vt\x01"
"""How a value of this module begins, and no other."""

WHOLE = "input_ids"
PARTS = ("prompts", "responses")
"""The columns that `WHOLE` has one after the other."""

MIN_OBJECT_BYTES = 64
"""Values that are no tensors are written once if they are as large."""

PIECE_BYTES = 12
"""Bytes of a reference."""

_BITS = {1: np.dtype("u1"), 2: np.dtype("<i2"), 4: np.dtype("<i4"), 8: np.dtype("<i8")}
_DTYPES = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
_DTYPES += [torch.float32, torch.float64, torch.bfloat16, torch.float16]
_HEAD = struct.Struct("<4s7i")  # `MAGIC`, mark, kind, dtype, type that is stored, zeros, axes, pieces

Place = tuple[str, int]
"""A column, and the place of a row in the queue."""


class Kind(IntEnum):
    """What a value says."""

    TOKENS = 0  # elements of other rows, then own ones
    COUNT = 1  # 0, 1, 2, ...
    PART = 2  # a range of `WHOLE` of the same row
    OBJECT = 3  # no tensor: own bytes, or all those of another row


class Piece(NamedTuple):
    """`num` of the elements that a row holds itself, from its element `start` on."""

    row: int
    start: int
    num: int


@dataclass(frozen=True, slots=True)
class Value:
    """The value of a row's column. The range of `COUNT` and of `PART` is its only piece."""

    kind: Kind
    mark: int  # of the prompt, so that no row which got a cleared one's place is taken for it
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    own: np.ndarray  # (elements, ...): the bits, as integers of the dtype's size

    def to_bytes(self) -> bytes:
        """Return what `read_value` reads."""
        num_zeros = _num_before(self.own != 0)
        own = self.own[num_zeros:]
        if own.size and not self.dtype.is_floating_point:
            least, most = own.min(), own.max()
            own = own.astype(np.min_scalar_type(most if least >= 0 else min(least, ~most)))
        numbers = (*own.shape[1:], *chain.from_iterable(self.pieces))
        of_types = (_DTYPES.index(self.dtype), ord(own.dtype.char))
        head = _HEAD.pack(MAGIC, self.mark, self.kind, *of_types, num_zeros, own.ndim - 1, len(self.pieces))
        return b"".join((head, struct.pack(f"<{len(numbers)}i", *numbers), own.tobytes()))

    @property
    def num_elements(self) -> int:
        """How many elements are read, along the first axis."""
        return sum(piece.num for piece in self.pieces) + len(self.own)

    @property
    def owners(self) -> tuple[int, ...]:
        """The other rows that hold elements of the same column."""
        is_of_others = self.kind in (Kind.TOKENS, Kind.OBJECT)
        return tuple(piece.row for piece in self.pieces) if is_of_others else ()


def read_value(value: Any) -> Value | None:
    """Return what the bytes of a value say, or None for a value that is not of this module."""
    if not isinstance(value, bytes) or not value.startswith(MAGIC):
        return None
    _, mark, kind, dtype_index, stored, num_zeros, num_axes, num_pieces = _HEAD.unpack_from(value)
    numbers = struct.Struct(f"<{num_axes + 3 * num_pieces}i")
    axes_and_pieces = numbers.unpack_from(value, _HEAD.size)
    axes = axes_and_pieces[:num_axes]
    own = np.frombuffer(value, chr(stored), offset=_HEAD.size + numbers.size).reshape(-1, *axes)
    dtype = _DTYPES[dtype_index]
    bits = _BITS[dtype.itemsize]
    if num_zeros or own.dtype != bits:
        expanded = np.zeros((num_zeros + len(own), *axes), bits)
        expanded[num_zeros:] = own
        own = expanded
    pieces = tuple(Piece(*axes_and_pieces[at : at + 3]) for at in range(num_axes, len(axes_and_pieces), 3))
    return Value(Kind(kind), mark, dtype, pieces, own)


def _num_before(is_found: np.ndarray) -> int:
    """Return the number of elements before the first one with a number for which it is so."""
    if not is_found.size:
        return len(is_found)
    first = int(is_found.argmax())
    return first * len(is_found) // is_found.size if is_found.flat[first] else len(is_found)


class ColumnReader:
    """Puts the values of rows together; a value that is not of this module is what it is."""

    def __init__(self, known: Mapping[Place, Any]) -> None:
        """Read from what is `known`, to which the caller adds what is `missing`."""
        self._known = known
        self._values: dict[Place, Value | None] = {}
        self._wholes: dict[Place, np.ndarray] = {}  # `PARTS` are read of them, too

    def missing(self, places: Sequence[Place]) -> set[Place]:
        """Return places that must be known, too, to read these; when they are, ask again."""
        missing: set[Place] = set()
        for name, row in places:
            value = self._value((name, row))
            if value is not None and value.kind is Kind.PART:
                name = WHOLE
                if (WHOLE, row) not in self._known:
                    missing.add((WHOLE, row))
                    continue
                value = self._value((WHOLE, row))
            if value is not None:
                missing.update(place for owner in value.owners if (place := (name, owner)) not in self._known)
        return missing

    def read(self, place: Place) -> Any:
        """Return the tensor or the object at a place, as it was written.

        Raises:
            RuntimeError: A row that holds a part of it has been written again, or cleared.
        """
        value = self._value(place)
        if value is None:
            return self._known[place]
        bits = self._elements(value, place)
        if value.kind is Kind.OBJECT:
            return serial_utils.decode(list(map(bytearray, pickle.loads(bits.tobytes()))))
        return torch.from_numpy(bits).view(value.dtype)

    def read_nested(self, name: str, rows: Sequence[int]) -> torch.Tensor | None:
        """Return what `read` returns for each row as one nested tensor, or None where that is not put together at once.

        The elements of all rows are copied once, which tells with columns that have many numbers a token.
        """
        values = [self._value((name, row)) for row in rows]
        if name == WHOLE or not all(value is not None and value.kind is Kind.TOKENS for value in values):
            return None
        of_rows = cast(list[Value], values)
        if len({(value.dtype, value.own.shape[1:]) for value in of_rows}) > 1:
            return None
        elements = np.concatenate([part for value in of_rows for part in self._parts(value, name)])
        lens = [value.num_elements for value in of_rows]
        return torch.nested.nested_tensor_from_jagged(
            torch.from_numpy(elements).view(of_rows[0].dtype),
            torch.tensor([0, *accumulate(lens)]),
            min_seqlen=min(lens),
            max_seqlen=max(lens),
        )

    def _value(self, place: Place) -> Value | None:
        if place not in self._values:
            self._values[place] = read_value(self._known[place])
        return self._values[place]

    def _elements(self, value: Value, place: Place) -> np.ndarray:
        name, row = place
        if value.kind is Kind.COUNT:
            return np.arange(value.pieces[0].num)
        if value.kind is Kind.PART:
            ((_, start, count),) = value.pieces
            return self._elements(self._owner((WHOLE, row), mark=value.mark), (WHOLE, row))[start : start + count]
        if place not in self._wholes:
            elements = np.concatenate(self._parts(value, name))
            if name != WHOLE:
                return elements
            self._wholes[place] = elements
        return self._wholes[place]

    def _parts(self, value: Value, name: str) -> list[np.ndarray]:
        owners = [self._owner((name, owner), mark=value.mark).own for owner in value.owners]
        pairs = zip(value.pieces, owners, strict=True)
        return [*(own[piece.start : piece.start + piece.num] for piece, own in pairs), value.own]

    def _owner(self, place: Place, *, mark: int) -> Value:
        owner = self._value(place)
        if owner is None or owner.mark != mark:
            raise owner_is_gone(place)
        return owner


def owner_is_gone(place: Place) -> RuntimeError:
    """Return the error of a reader that needs a place which has been written again or cleared."""
    return RuntimeError(
        f"column {place[0]!r} of row {place[1]} holds elements of other rows of its prompt, but has been written again "
        "or cleared before them: write and clear all rows of a prompt together, or set "
        "transfer_queue.backend.SimpleStorage.trees=false"
    )


@dataclass(frozen=True, slots=True)
class _WrittenRow:
    """What later rows refer to."""

    values: dict[str, Value]  # those of tokens
    num_tokens: int
    prompt_len: int

    def first_place(self, num_elements: int) -> int:
        """Return the place of the path at which a column begins that has as many elements."""
        return self.prompt_len if num_elements == self.num_tokens - self.prompt_len else 0


class PromptColumns:
    """The rows of a prompt that are written, as far as later ones refer to them."""

    def __init__(self) -> None:
        self._mark = secrets.randbits(31)
        self._order: list[tuple[bytes, int]] = []  # the tokens of the rows, and the rows; sorted
        self._rows: dict[int, _WrittenRow] = {}
        self._objects: dict[tuple[str, bytes], int] = {}  # the first row with a value, by column and digest

    def copy(self) -> Self:
        """Return a draft: writing may fail, and rows that are written meanwhile must not refer to these."""
        draft = object.__new__(type(self))
        draft._mark = self._mark
        draft._order, draft._rows, draft._objects = self._order.copy(), self._rows.copy(), self._objects.copy()
        return draft

    def take(self, draft: Self) -> None:
        """Take the rows of a draft that have been written."""
        for token_bytes, row in draft._order:
            if row not in self._rows:
                insort(self._order, (token_bytes, row))
        self._rows = draft._rows | self._rows
        self._objects = draft._objects | self._objects

    def encode(self, columns: Mapping[str, Any], row: int) -> dict[str, Any]:
        """Return the columns of a new row as they are written.

        Args:
            columns: By name, a tensor or any object.
            row: Its place in the queue.

        Returns:
            Bytes, or the value itself if nothing is gained.
        """
        assert row not in self._rows, "others refer to what a row was written with"
        if not {WHOLE, *PARTS} <= columns.keys():
            return dict(columns)
        whole, parts = columns[WHOLE], [columns[name] for name in PARTS]
        if {each.dtype for each in (whole, *parts)} != {torch.int64} or not torch.equal(torch.cat(parts), whole):
            return dict(columns)
        token_bytes = whole.numpy().astype(TOKEN_TYPE).tobytes()
        nearest = self._nearest(token_bytes)
        insort(self._order, (token_bytes, row))
        self._rows[row] = written = _WrittenRow({}, len(whole), len(parts[0]))
        encoded = dict(columns)
        for name, column in columns.items():
            if name in PARTS:
                value = self._range(Kind.PART, written.prompt_len if name == PARTS[1] else 0, len(column))
            else:
                value = self._encode(name, column, row, nearest=nearest)
            if value is not None:
                encoded[name] = value.to_bytes()
            if value is not None and value.kind is Kind.TOKENS:
                written.values[name] = value
        return encoded

    def _nearest(self, token_bytes: bytes) -> int | None:
        """Return the row that shares most tokens: it is a neighbour in the order."""
        at = bisect_left(self._order, (token_bytes, -1))
        neighbours = self._order[max(at - 1, 0) : at + 1]
        return max(neighbours, key=lambda each: num_shared_tokens(each[0], token_bytes))[1] if neighbours else None

    def _encode(self, name: str, column: Any, row: int, *, nearest: int | None) -> Value | None:
        if not isinstance(column, torch.Tensor):
            return self._object(name, column, row)
        if column.ndim == 0 or column.numel() == 0 or column.dtype not in _DTYPES or column.device.type != "cpu":
            return None
        bits = column.contiguous().view(torch.uint8).numpy().view(_BITS[column.element_size()]).reshape(column.shape)
        may_count = column.ndim == 1 and column.dtype == torch.int64 and bits[0] == 0 and bits[-1] == len(bits) - 1
        if may_count and np.array_equal(bits, np.arange(len(bits))):
            return self._range(Kind.COUNT, 0, len(bits))
        pieces = self._shared(name, bits, column.dtype, first=self._rows[row].first_place(len(bits)), nearest=nearest)
        # A copy, or all of the tensor would be kept.
        own = bits[sum(piece.num for piece in pieces) :].copy()
        return Value(Kind.TOKENS, self._mark, column.dtype, pieces, own)

    def _range(self, kind: Kind, start: int, count: int) -> Value:
        return Value(kind, self._mark, torch.int64, (Piece(0, start, count),), np.zeros(0, np.int64))

    def _object(self, name: str, column: Any, row: int) -> Value | None:
        if column is None or isinstance(column, int | float) or (isinstance(column, str) and len(column) < 16):
            return None
        # Read by the queue's own decoder, as if the queue had sent it: it makes lists of tuples, for one.
        frames = pickle.dumps([bytes(cast(bytes, frame)) for frame in serial_utils.encode(column)])
        if len(frames) < MIN_OBJECT_BYTES:
            return None
        owner = self._objects.setdefault((name, blake2b(frames, digest_size=16).digest()), row)
        is_own = owner == row
        own = np.frombuffer(frames if is_own else b"", np.uint8)
        return Value(Kind.OBJECT, self._mark, torch.uint8, () if is_own else (Piece(owner, 0, len(frames)),), own)

    def _shared(
        self, name: str, bits: np.ndarray, dtype: torch.dtype, *, first: int, nearest: int | None
    ) -> tuple[Piece, ...]:
        """Return where the first elements of a column lie that the nearest row has at the same places of the path."""
        other = self._rows[nearest].values.get(name) if nearest is not None else None
        if other is None or other.dtype != dtype:
            return ()
        assert nearest is not None
        skipped = first - self._rows[nearest].first_place(other.num_elements)
        if skipped < 0 or other.own.shape[1:] != bits.shape[1:]:
            return ()
        pieces: list[Piece] = []
        num = 0
        for owner, start, count in (*other.pieces, Piece(nearest, 0, len(other.own))):
            before = min(skipped, count)
            skipped -= before
            mine = bits[num : num + count - before]
            theirs = self._rows[owner].values[name].own[start + before :][: len(mine)]
            if same := _num_before(mine != theirs):
                pieces.append(Piece(owner, start + before, same))
            num += same
            if same < count - before:
                break
        return tuple(pieces) if bits[:num].nbytes > PIECE_BYTES * len(pieces) else ()
