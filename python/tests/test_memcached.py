"""pymemcache with its default settings, in front of a memcached: directly, through a proxy, and through a proxy with the cache."""

import shutil
import socket
import subprocess

import pytest
import serval
from conftest import eventually
from pymemcache.client.base import Client


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def answers(port):
    try:
        with socket.create_connection(("127.0.0.1", port)):
            return True
    except OSError:
        return False


@pytest.fixture
def memcached():
    if shutil.which("memcached") is None:
        pytest.skip("memcached is not installed")
    for _ in range(10):
        port = free_port()
        process = subprocess.Popen(["memcached", "-l", "127.0.0.1", "-p", str(port), "-U", "0", "-u", "nobody", "-m", "16"], stderr=subprocess.DEVNULL)
        # Another program may have taken the port meanwhile: then this one ends.
        eventually("memcached answers or ends", lambda: process.poll() is not None or answers(port))
        if process.poll() is None:
            break
    yield port
    process.kill()
    process.wait()


def use(port):
    """What the methods of a client return."""
    client = Client(("127.0.0.1", port), timeout=60)
    try:
        yield client.set("some_key", "some_value")
        yield client.get("some_key")
        yield client.set_many({"a": "1", "b": "x" * 5000, "c": ""})
        yield client.get_many(["a", "b", "c", "d"])
        yield [client.get("a") for _ in range(5)]
        value, number = client.gets("a")
        yield value
        yield client.cas("a", "2", number)
        yield client.cas("a", "3", number)
        yield client.add("a", "9"), client.replace("a", "10"), client.append("a", "0"), client.prepend("a", "1")
        yield client.incr("a", 5), client.decr("a", 1), client.incr("none", 1)
        yield client.touch("a", 1000), client.touch("a", 1000, noreply=False)
        yield client.get("a")
        yield client.set("a", "y", noreply=False), client.get("a")
        yield client.delete("a"), client.delete("b", noreply=False), client.delete_many(["c", "some_key"])
        yield client.get_many(["a", "b", "c", "some_key"])
        yield client.set("b", "z"), client.flush_all(), client.get("b")
        yield client.version()
    finally:
        client.close()


def test_pymemcache_finds_a_memcached_behind_a_proxy_with_and_without_the_cache(memcached):
    expected = list(use(memcached))
    service = {"name": "proxy", "listen": "tcp://127.0.0.1:0", "upstream": f"127.0.0.1:{memcached}", "framing": "memcached", "request_timeout_ms": 60000}
    cache = {"name": "hot", "function": "memcached-cache", "params": {"grace_ms": 1, "sample": 0}, "deadline_us": 1000000}
    for functions in [{}, {"function": [cache]}]:
        with serval.Engine({"schema": 1, "service": [{**service, **functions}]}) as engine:
            port = int(engine.urls["proxy"][0].rsplit(":", 1)[1])
            for _ in range(3):
                assert list(use(port)) == expected
