"""The parts of :class:`serval.Client` and :class:`serval.aio.Client` that do not wait."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ._errors import ConfigError, ConnectionLost, ReplyTimeout
from ._framing import Framing, as_bytes
from ._url import parse

if TYPE_CHECKING:
    from ._types import Buffer

#: Longest datagram.
DATAGRAM_BYTES_MAX = 65507
#: Bytes of one read of a connection.
READ_BYTES = 1 << 16


class ClientBase:
    """The address of the server, the framing, and the time limit."""

    def __init__(
        self,
        url: str,
        *,
        framing: str = "length:u32",
        timeout: float = 1.0,
        reply_bytes: int | None = None,
    ) -> None:
        self._scheme, self._host, self._port = parse(url)
        if timeout <= 0:
            raise ConfigError(f"timeout is {timeout} seconds, must be positive")
        self.url = url
        self.timeout = timeout
        self._framing = Framing(framing, reply_bytes)
        #: The addresses of datagrams; names are looked up once.
        self._addresses: list[Any] = []

    def _encoded(self, messages: Iterable[Buffer], in_flight: int) -> list[bytes]:
        if in_flight < 1:
            raise ConfigError(f"in_flight is {in_flight}, must be positive")
        return [as_bytes(message) for message in messages]

    def _complete(self, replies: list[bytes | None]) -> list[bytes]:
        found = [reply for reply in replies if reply is not None]
        if lacking := len(replies) - len(found):
            raise ReplyTimeout(
                f"{self.url} sent no reply to {lacking} of {len(replies)} messages, "
                f"the first of them {replies.index(None)}",
                replies=replies,
            )
        return found

    def _late(self) -> ReplyTimeout:
        return ReplyTimeout(f"{self.url} sent no reply in time")

    def _lost(self, error: OSError) -> ConnectionLost:
        return (
            error if isinstance(error, ConnectionLost) else ConnectionLost(f"{self.url}: {error}")
        )

    @contextlib.contextmanager
    def _attempt(self, opened: socket.socket, is_last: bool) -> Iterator[None]:
        """Closes a socket that cannot be connected; raises the failure of the last address."""
        try:
            yield
        except OSError as error:
            opened.close()
            if is_last:
                raise ConnectionLost(f"{self.url} cannot be reached: {error}") from None
        except BaseException:
            opened.close()
            raise
