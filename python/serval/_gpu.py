"""Arrays in the memory of a GPU, by the CUDA array interface: https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html"""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass
from typing import Any, NoReturn

from ._errors import CollectiveError, describe

_SUMMED = {"<f4": "float32", "<i4": "int32"}
#: Byte order, kind and size of an element.
_TYPE = re.compile(r"[<>|][a-zA-Z](\d{1,9})")
_WORD = 1 << 64


def _refuse(why: str) -> NoReturn:
    raise CollectiveError(why, reason="argument")


@dataclass(frozen=True)
class GpuArray:
    """Contiguous memory at an address of the process. The native module checks the address."""

    #: Keeps the memory allocated.
    owner: Any
    address: int
    bytes: int
    #: ``"float32"`` or ``"int32"``, if an all-reduce sums them.
    dtype: str | None
    #: The content is complete after what this stream has been given so far.
    stream: int | None = None
    #: The content is complete when this event has occurred.
    event: int | None = None


def gpu_array(buffer: Any, stream: int | None) -> GpuArray | None:
    """The array of an object with the CUDA array interface, which may say anything. None if it has none: it is in host memory."""
    if isinstance(buffer, GpuArray):
        return buffer
    try:
        interface = buffer.__cuda_array_interface__
    except AttributeError:
        return None
    except Exception as error:
        # Such as that of a tensor that needs a gradient.
        raise CollectiveError(f"{describe(buffer)} cannot be used: {error}", reason="argument") from error
    what = describe(buffer)
    try:
        version, kind = int(interface["version"]), str(interface["typestr"])
        shape = tuple(int(size) for size in interface["shape"])
        address, is_readonly = interface["data"]
        address = int(address or 0)
        strides = interface.get("strides")
        strides = None if strides is None else tuple(int(step) for step in strides)
        mask, own_stream = interface.get("mask"), interface.get("stream")
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CollectiveError(f"{what} has no valid __cuda_array_interface__: {error!r}", reason="argument") from error
    size = _TYPE.fullmatch(kind)
    if size is None or any(length < 0 for length in shape) or not 0 <= address < _WORD:
        _refuse(f"{what} has no valid __cuda_array_interface__: typestr {kind!r}, shape {shape}, address {address}")
    count, item = math.prod(shape), int(size[1])
    if count * item >= _WORD // 2:
        _refuse(f"{what} has no valid __cuda_array_interface__: {count} elements of {item} bytes are more than any memory")
    if mask is not None:
        _refuse(f"{what} has a mask: give an array without one")
    if is_readonly:
        _refuse(f"{what} is read-only: give an array that can be written")
    if count and not _is_contiguous(shape, strides, item):
        _refuse(f"{what} is not contiguous (strides {strides}): give a contiguous copy of it")
    return GpuArray(buffer, address, count * item, _SUMMED.get(kind), _stream(buffer, what, version, own_stream, stream))


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...] | None, item: int) -> bool:
    if strides is None:
        return True
    if len(strides) != len(shape):
        return False
    expected = item
    for length, step in zip(reversed(shape), reversed(strides)):
        if length != 1 and step != expected:
            return False
        expected *= length
    return True


def _stream(buffer: Any, what: str, version: int, own: Any, given: int | None) -> int | None:
    """The stream after which the array's content is complete."""
    if given is not None:
        stream = given
    elif version >= 3:
        # None: its content is complete.
        if own is None:
            return None
        if own == 0:
            _refuse(f"{what} has no valid __cuda_array_interface__: its stream is 0")
        stream = own
    else:
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(buffer, torch.Tensor):
            _refuse(f"{what} does not name the stream that writes it (its interface has version {version}): give it as stream=")
        stream = torch.cuda.current_stream(buffer.device).cuda_stream
    if not isinstance(stream, int) or not 0 <= stream < _WORD:
        _refuse(f"{what}: the stream {stream!r} is no handle of a CUDA stream: give an integer, such as torch.cuda.Stream.cuda_stream")
    # 1 and 2 are the default streams; for CUDA itself 0 is the first of them.
    return stream or 1
