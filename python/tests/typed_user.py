"""A program that uses the package, for `mypy --strict`."""

import asyncio

import serval
import serval.aio


def upper(messages: list[bytes]) -> list[bytes]:
    return [message.upper() for message in messages]


def double(messages: list[bytes]) -> list[bytes | Exception]:
    return [b"%d" % (2 * int(m)) if m.isdigit() else serval.ErrorReply(b"ERR") for m in messages]


async def ask(url: str) -> bytes:
    async with serval.aio.Client(url, timeout=10) as client:
        reply: bytes = await client.ask(b"a")
        return reply


def main() -> list[bytes]:
    with serval.serve(upper, listen="udp://127.0.0.1:0", batch=32, on_error="stop") as server:
        url: str = server.url
        with serval.Client(url, timeout=10) as client:
            replies: list[bytes] = [asyncio.run(ask(url)), client.ask(bytearray(b"b"))]
        total: float = server.metrics().total("serval_replies_total")
        assert total >= 0
    with serval.serve(double, listen="udp://127.0.0.1:0"):
        pass
    return replies
