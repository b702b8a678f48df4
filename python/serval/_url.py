"""Addresses of clients: ``udp://HOST:PORT`` and ``tcp://HOST:PORT``."""

from __future__ import annotations

from ._errors import ConfigError


def parse(url: str) -> tuple[str, str, int]:
    """Scheme, host and port."""
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(url)
        scheme, host, port = parts.scheme, parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"{url!r} is no address: {error}") from None
    if scheme not in ("udp", "tcp") or not host or not port or parts.path not in ("", "/"):
        raise ConfigError(f"{url!r} is no address: write udp://HOST:PORT or tcp://HOST:PORT")
    return scheme, host, port
