"""Serval: network services whose messages a function, a kernel or a GPU answers.

>>> import serval
>>> with serval.serve(lambda messages: [m.upper() for m in messages], listen="udp://127.0.0.1:9000") as server:
...     server.wait()

:func:`serve` serves a Python function, :class:`Engine` runs the services of a configuration, :class:`Client` and
:class:`serval.aio.Client` ask them. The command ``serval`` is installed with the package.
"""

from __future__ import annotations

from ._client import Client
from ._codes import DROP_REASON_NAMES
from ._engine import Engine
from ._errors import (
    CallTimeout,
    ClientError,
    CollectiveError,
    ConfigError,
    ConnectionLost,
    EngineError,
    Error,
    ErrorReply,
    FramingError,
    FunctionError,
    FunctionRaised,
    ReplyCountError,
    ReplyShapeError,
    ReplyTimeout,
    ReplyTooLong,
    ReplyTypeError,
)
from ._serve import Server, serve

__all__ = [
    "DROP_REASON_NAMES",
    "CallTimeout",
    "Client",
    "ClientError",
    "CollectiveError",
    "ConfigError",
    "ConnectionLost",
    "Engine",
    "EngineError",
    "Error",
    "ErrorReply",
    "FramingError",
    "FunctionError",
    "FunctionRaised",
    "ReplyCountError",
    "ReplyShapeError",
    "ReplyTimeout",
    "ReplyTooLong",
    "ReplyTypeError",
    "Server",
    "serve",
]
