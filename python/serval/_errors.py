"""The exceptions of the package. All of them are children of :class:`Error`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._types import Buffer


class Error(Exception):
    """The base of all exceptions of this package."""


class ConfigError(Error, ValueError):
    """A configuration or an argument is wrong; the text says which one and how to correct it."""


class EngineError(Error):
    """The engine could not start, cannot be reached, or ended by itself."""

    def __init__(self, text: str, *, exit_code: int | None = None, log: str = "") -> None:
        super().__init__(text)
        #: The exit code of the engine's process, if it has ended. Negative: the signal that ended it.
        self.exit_code = exit_code
        #: The last lines that the engine logged.
        self.log = log


class ErrorReply(Error):
    """The reply to a message with which a served function failed, in the words of its protocol. The function returns it in the place of a
    reply, or raises it: then the messages of its batch are tried alone, and those that raise it again get it. The client gets ``reply``, and the
    server counts the message in ``stats()["errors"]["ErrorReply"]``.

    >>> def square(messages):
    ...     return [b"%d" % (int(m) ** 2) if m.isdigit() else serval.ErrorReply(b"ERR not a number") for m in messages]
    """

    def __init__(self, reply: Buffer) -> None:
        super().__init__(reply)
        #: Its bytes.
        self.reply = reply


class FunctionError(Error):
    """A served function failed. The messages with which it failed alone were dropped and counted; their clients get no reply."""

    def __init__(
        self,
        text: str,
        *,
        messages: int,
        index: int | None = None,
        shape: tuple[int, ...] | None = None,
        dtype: str | None = None,
    ) -> None:
        super().__init__(text)
        #: How many messages the call had.
        self.messages = messages
        #: The place in its batch of the message that was dropped, if it is a single one.
        self.index = index
        #: The shape of the array that is wrong, if it is an array.
        self.shape = shape
        #: Its dtype.
        self.dtype = dtype


class FunctionRaised(FunctionError):
    """The function raised an exception, or returned it for a message. It is the cause (``__cause__``) of this one."""


class ReplyCountError(FunctionError):
    """The function returned another number of replies than it got messages. What it yields is read up to one reply more than messages."""


class ReplyTypeError(FunctionError, TypeError):
    """The function returned something that is not bytes-like, or an array of another dtype than declared."""


class ReplyShapeError(FunctionError, ValueError):
    """The function returned an array of another shape than declared."""


class ReplyTooLong(FunctionError, ValueError):
    """A reply is longer than ``max_reply_bytes``. Its message counts as ``reply_too_long``."""


class CallTimeout(FunctionError, TimeoutError):
    """A call of the function takes longer than ``call_timeout``. Its messages were dropped as ``accelerator_lost``. The service
    continues when the call has returned; until then its requests are dropped as ``no_accelerator``."""


class ClientError(Error):
    """A client could not send a message or receive its reply."""


class ReplyTimeout(ClientError, TimeoutError):
    """No reply arrived in time. A server drops requests without an answer over UDP."""

    def __init__(self, text: str, *, replies: list[bytes | None] | None = None) -> None:
        super().__init__(text)
        #: Of :meth:`Client.ask_many`: the replies that arrived, ``None`` for the others.
        self.replies: list[bytes | None] = replies or []


class ConnectionLost(ClientError, ConnectionError):
    """The server cannot be reached, or closed the connection before the reply."""


class FramingError(ClientError, ValueError):
    """A message cannot be sent in the framing of the connection, or the server's bytes do not fit it."""


def describe(value: Any) -> str:
    """A value in an error message: its type, and the shape and dtype of an array."""
    kind = type(value)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    try:
        return f"{name} of shape {tuple(value.shape)} and dtype {value.dtype}"
    except Exception:  # noqa: BLE001 - the value is of the user, and so are its attributes
        return name


class TransferError(Error, OSError):
    """A transfer could not start, or ended early."""

    def __init__(self, text: str, *, reason: str, errno: int, result: Any) -> None:
        super().__init__(errno, text)
        #: Why, as a word: those of docs/transfer.md, such as ``closed``, ``disk_full`` or ``not_verified``.
        self.reason = reason
        #: What it did until then (:class:`serval.transfer.Result`). Its counts are exact.
        self.result = result

    def __str__(self) -> str:
        return str(self.strerror)


class CollectiveError(Error):
    """A call of a group failed, or the group was not formed. The group cannot be used any more, unless the reason is ``argument``."""

    def __init__(self, text: str, *, reason: str) -> None:
        super().__init__(text)
        #: Why, as a word: those of docs/collectives.md, such as ``rank_lost``, ``disagreement`` or ``deadline``.
        self.reason = reason
