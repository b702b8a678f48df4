"""Messages as NumPy arrays, batch first. The only module that imports NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ._errors import ConfigError, ReplyShapeError, ReplyTypeError, describe


class Arrays:
    """How a message is an array, and how an array is the replies."""

    def __init__(self, dtype: Any, shape: Sequence[int], reply_dtype: Any, reply_shape: Sequence[int] | None) -> None:
        self.dtype = _plain(dtype, "dtype")
        self.shape = _shape(shape, "shape")
        self.reply_dtype = self.dtype if reply_dtype is None else _plain(reply_dtype, "reply_dtype")
        self.reply_shape = None if reply_shape is None else _shape(reply_shape, "reply_shape")
        #: Bytes of a message.
        self.row_bytes = self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))
        #: Bytes of a reply, if it is known.
        self.reply_bytes = None
        if self.reply_shape is not None:
            self.reply_bytes = self.reply_dtype.itemsize * int(np.prod(self.reply_shape, dtype=np.int64))

    def array(self, rows: bytearray, count: int) -> Any:
        """The messages, without a copy. The function may write to it."""
        return np.frombuffer(rows, self.dtype).reshape(count, *self.shape)

    def rows(self, replies: Any, count: int) -> Any:
        """The replies as contiguous rows, after a check."""
        if not isinstance(replies, np.ndarray):
            text = f"the function returned {describe(replies)}, not a numpy.ndarray"
            raise ReplyTypeError(text, messages=count)
        shape, dtype = tuple(replies.shape), str(replies.dtype)
        if replies.dtype != self.reply_dtype:
            text = f"the function returned dtype {dtype}, reply_dtype is {self.reply_dtype}"
            raise ReplyTypeError(text, messages=count, shape=shape, dtype=dtype)
        if replies.ndim == 0 or replies.shape[0] != count:
            text = f"the function returned shape {shape}, the first dimension has to be {count}, the messages"
            raise ReplyShapeError(text, messages=count, shape=shape, dtype=dtype)
        if self.reply_shape is not None and replies.shape[1:] != self.reply_shape:
            text = f"the function returned shape {shape}, expected {(count, *self.reply_shape)}"
            raise ReplyShapeError(text, messages=count, shape=shape, dtype=dtype)
        return np.ascontiguousarray(replies).reshape(-1).view(np.uint8)


def _plain(dtype: Any, name: str) -> np.dtype[Any]:
    try:
        found: np.dtype[Any] = np.dtype(dtype)
    except TypeError as error:
        raise ConfigError(f"{name}: {error}") from None
    if found.hasobject or found.itemsize == 0:
        raise ConfigError(f"{name} is {found}, which has no fixed size in bytes")
    return found


def _shape(shape: Sequence[int], name: str) -> tuple[int, ...]:
    try:
        found = tuple(int(size) for size in shape)
    except TypeError:
        raise ConfigError(f"{name} is {shape!r}, must be a tuple of integers") from None
    if any(size < 1 for size in found):
        raise ConfigError(f"{name} is {found}, every size must be positive")
    return found
