"""Types of annotations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Union

if TYPE_CHECKING:
    #: A bytes-like object: anything with the buffer protocol, such as an array.
    Buffer = Union[bytes, bytearray, memoryview, Any]
    #: What a served function returns for a message: a reply; ``None``, no reply is wanted; an exception, the message is dropped; or an
    #: :class:`serval.ErrorReply`.
    Reply = Union[Buffer, BaseException, None]
