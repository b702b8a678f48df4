"""Types of annotations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Union

if TYPE_CHECKING:
    #: A bytes-like object: anything with the buffer protocol, such as an array.
    Buffer = Union[bytes, bytearray, memoryview, Any]
