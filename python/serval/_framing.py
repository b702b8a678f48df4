"""Framings of messages on TCP connections, without I/O: what a client writes, and where a reply ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._errors import ConfigError, FramingError

if TYPE_CHECKING:
    from ._types import Buffer

#: A reply that is longer is refused: the server's bytes do not fit the framing.
REPLY_BYTES_MAX = 64 << 20


def as_bytes(message: Buffer) -> bytes:
    """The bytes of a bytes-like object."""
    return message if type(message) is bytes else memoryview(message).tobytes()


class Framing:
    """A framing by its name in a configuration: ``length:u16``, ``length:u32``, ``fixed:N``, ``line``, ``line-crlf`` or ``raw``."""

    def __init__(self, name: str, reply_bytes: int | None = None) -> None:
        self.name = name
        self._length = {"length:u16": 2, "length:u32": 4}.get(name, 0)
        self._line = {"line": b"\n", "line-crlf": b"\r\n"}.get(name, b"")
        self._fixed = 0
        if name.startswith("fixed:") and name[6:].isdigit() and int(name[6:]) > 0:
            self._fixed = int(name[6:])
        elif not (self._length or self._line or name == "raw"):
            raise ConfigError(
                f"framing {name!r}: a client knows raw, fixed:N, length:u16, length:u32, line and line-crlf"
            )
        self._reply = self._fixed if reply_bytes is None else reply_bytes
        if self._fixed and self._reply <= 0:
            raise ConfigError(f"reply_bytes is {reply_bytes}, must be positive")

    @property
    def delimits(self) -> bool:
        """Whether the end of a reply is known, so that several requests can be in flight."""
        return self.name != "raw"

    def encode(self, message: bytes) -> bytes:
        """The message as it is written."""
        if self._length:
            if len(message) >= 1 << (8 * self._length):
                raise FramingError(f"a message of {len(message)} bytes does not fit framing {self.name}")
            return len(message).to_bytes(self._length, "big") + message
        if self._fixed and len(message) != self._fixed:
            raise FramingError(f"framing {self.name} needs messages of {self._fixed} bytes, not {len(message)}")
        if self._line and b"\n" in message:
            raise FramingError(f"a message with a line feed does not fit framing {self.name}")
        return message + self._line

    def decode(self, received: bytearray) -> bytes | None:
        """Takes the first reply out of what was received; ``None`` if it is not complete."""
        if self._length:
            if len(received) < self._length:
                return None
            start, size = self._length, int.from_bytes(received[: self._length], "big")
            if size > REPLY_BYTES_MAX:
                raise FramingError(f"the server announces a reply of {size} bytes: it speaks another framing")
            if len(received) < start + size:
                return None
            end = start + size
        elif self._line:
            start, size = 0, received.find(b"\n")
            if size < 0:
                if len(received) > REPLY_BYTES_MAX:
                    raise FramingError("the server sends no end of line: it speaks another framing")
                return None
            end = size + 1
            if size and received[size - 1 : size] == b"\r":
                size -= 1
        elif self._fixed:
            start, size, end = 0, self._reply, self._reply
            if len(received) < size:
                return None
        else:
            if not received:
                return None
            start, size, end = 0, len(received), len(received)
        reply = bytes(received[start : start + size])
        del received[:end]
        return reply
