"""Engines in a process of their own, started and stopped by this package."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from . import _toml
from ._errors import ConfigError, EngineError

if TYPE_CHECKING:
    import subprocess

    from ._metrics import Metrics

_log = logging.getLogger("serval.engine")
#: Lines of the engine's log that an exception shows.
_LOG_LINES = 50
#: An engine ends this many seconds after `drain_ms` whatever hangs in it; then it is killed.
_END_PATIENCE = 7.0
#: The default of `engine.drain_ms`.
_DRAIN_SECONDS = 3.0
#: Longest path of a socket, without room for the longest file name in the folder.
_FOLDER_BYTES_MAX = 107 - len("/control.sock")


def binary() -> str:
    """The path of the ``serval`` command that the package carries."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_bin", "serval")
    if not os.path.exists(path):
        raise EngineError(f"the package is incomplete: {path} does not exist; install it again")
    return path


def make_folder() -> str:
    """A new folder for sockets, private to this user."""
    import tempfile

    folder = tempfile.mkdtemp(prefix="serval-")
    if len(os.fsencode(folder)) > _FOLDER_BYTES_MAX:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="serval-", dir="/tmp")
    return folder


def remove_folder(folder: str) -> None:
    """Removes a folder with everything in it, if it exists."""
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def _write(path: str, table: Mapping[str, Any]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(_toml.dumps(table))


class Engine:
    """An engine with the services of a configuration, in a child process.

    >>> with serval.Engine({"schema": 1, "service": [{"name": "echo", "listen": "udp://127.0.0.1:0", "kernel": "echo"}]}) as engine:
    ...     serval.Client(engine.urls["echo"][0]).ask(b"hello")

    The process ends with this one, however this one ends. Ctrl-C reaches only this process.

    :param config: the path of a TOML file, or its content as text or as a dict. In text and dicts, paths of kernels are relative to the
        current folder.
    :param ready_timeout: seconds until every port is open and every kernel runs.
    :param log: the level from which lines of the engine's log go to the logger ``serval.engine``.
    :raises ConfigError: the configuration is wrong.
    :raises EngineError: the engine could not start.
    """

    def __init__(
        self, config: str | os.PathLike[str] | Mapping[str, Any], *, ready_timeout: float = 30.0, log: str = "warn"
    ) -> None:
        self._folder = make_folder()
        self._stopping = threading.Lock()
        self._ended = threading.Event()
        self._ready = threading.Event()
        self._on_end: Callable[[], None] | None = None
        self._asked = False
        #: Whether this process is a fork of the one that the engine belongs to.
        self._foreign = False
        self._exit_code: int | None = None
        self._readers: list[threading.Thread] = []
        self._lines: deque[str] = deque(maxlen=_LOG_LINES)
        self._process: subprocess.Popen[bytes] | None = None
        #: For each service the addresses where clients reach it, with the ports that the host kernel chose.
        self.urls: dict[str, list[str]] = {}
        #: The last object that the engine printed: its counters when it ended.
        self.report: dict[str, Any] = {}
        try:
            path, self._control = self._prepare(config)
            command = [binary(), "serve", path, "--json", "--log", log, "--stop-on-eof"]
            command += ["--set", f"engine.control={self._control}"]
            self._start(command, ready_timeout)
        except BaseException:
            self._kill()
            remove_folder(self._folder)
            raise

    def _prepare(self, config: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[str, str]:
        """The configuration as a file, and the path of the control socket."""
        import tomllib

        control = os.path.join(self._folder, "control.sock")
        path = os.path.join(self._folder, "service.toml")
        try:
            if isinstance(config, Mapping):
                table = _with_absolute_kernels(config)
                _write(path, table)
            elif isinstance(config, str) and "\n" in config:
                table = _with_absolute_kernels(tomllib.loads(config))
                _write(path, table)
            else:
                path = os.fspath(config)
                with open(path, "rb") as file:
                    table = tomllib.load(file)
        except (OSError, UnicodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"the configuration cannot be read: {error}") from None
        engine = table.get("engine")
        drain_ms = engine.get("drain_ms") if isinstance(engine, Mapping) else None
        self._drain_seconds = drain_ms / 1000 if isinstance(drain_ms, int) else _DRAIN_SECONDS
        return path, control

    def _start(self, command: list[str], ready_timeout: float) -> None:
        import subprocess

        pipe = subprocess.PIPE
        # In a process group of its own: Ctrl-C in a terminal would end the engine before this process has closed its services.
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, process_group=0)
        assert self._process.stdout and self._process.stderr
        self._readers = [
            threading.Thread(target=self._read_events, args=(self._process.stdout,), daemon=True, name="serval-events"),
            threading.Thread(target=self._read_log, args=(self._process.stderr,), daemon=True, name="serval-log"),
        ]
        for reader in self._readers:
            reader.start()
        _live.add(self)
        if not self._ready.wait(ready_timeout):
            raise self._error(f"the engine is not ready after {ready_timeout} s")
        if self._exit_code is not None:
            for reader in self._readers[1:]:
                reader.join(1.0)
            if self._exit_code == 2:
                raise ConfigError(self.log or "the configuration is wrong")
            raise self._error(f"the engine could not start (exit code {self._exit_code})")

    def _read_events(self, output: IO[bytes]) -> None:
        """The engine's standard output: the line when it is ready, and the last one. Its end is the end of the engine."""
        import json

        for line in output:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if event.get("event") == "ready":
                self.urls = {service["name"]: service["listen"] for service in event["services"]}
                self._ready.set()
            elif event.get("event") == "stopped":
                self.report = event
        output.close()
        assert self._process
        self._exit_code = self._process.wait()
        self._ended.set()
        self._ready.set()
        if self._on_end and not self._asked:
            self._on_end()

    def _read_log(self, output: IO[bytes]) -> None:
        for raw in output:
            line = raw.decode(errors="replace").rstrip()
            self._lines.append(line)
            level = logging.ERROR if " ERROR " in line else logging.WARNING
            if self._ready.is_set():
                _log.log(level, "%s", line)
        output.close()

    def _error(self, text: str) -> EngineError:
        return EngineError(f"{text}\n{self.log}".rstrip(), exit_code=self._exit_code, log=self.log)

    @property
    def log(self) -> str:
        """The last lines that the engine logged."""
        return "\n".join(self._lines)

    @property
    def pid(self) -> int:
        """The process of the engine."""
        assert self._process
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code of the engine, or ``None`` while it runs."""
        return self._exit_code

    @property
    def control(self) -> str:
        """The path of the control socket."""
        return self._control

    def metrics(self) -> Metrics:
        """All counters now, by name and labels; ``metrics().total("serval_replies_total", service="echo")`` adds some up."""
        from ._metrics import fetch

        if self._ended.is_set():
            raise self._error("the engine has ended")
        return fetch(self._control)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the engine has ended. Returns whether it has.

        :raises EngineError: it ended by itself.
        """
        if not self._ended.wait(timeout):
            return False
        if not self._asked:
            raise self._error(f"the engine ended by itself (exit code {self._exit_code})")
        return True

    def close(self, timeout: float | None = None) -> None:
        """Drains and ends the engine: accepted requests are answered for up to ``engine.drain_ms``.

        :param timeout: seconds after which it is killed.
        """
        if self._foreign:
            return
        with self._stopping:
            if not self._ended.is_set():
                self._asked = True
            if self._process and self._process.stdin and not self._process.stdin.closed:
                self._process.stdin.close()
            if not self._ended.wait(self._drain_seconds + _END_PATIENCE if timeout is None else timeout):
                self._kill()
            for reader in self._readers:
                if reader is not threading.current_thread():
                    reader.join(1.0)
            remove_folder(self._folder)
            _live.discard(self)

    def _kill(self) -> None:
        if self._process and self._process.poll() is None:
            self._asked = True
            self._process.kill()
            self._ended.wait(5.0)
        if self._process and self._process.stdin:
            self._process.stdin.close()

    def _forget(self) -> None:
        """In a child process after a fork: the engine belongs to the parent."""
        self._foreign = self._asked = True
        # Another thread may have held the lock of the old one at the fork.
        self._ended = threading.Event()
        self._ended.set()
        if self._process and self._process.stdin:
            # Unbuffered, so no lock that another thread held at the fork.
            self._process.stdin.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _with_absolute_kernels(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration for a file in another folder than the current one."""

    def absolute(kernel: Any) -> Any:
        if isinstance(kernel, list):
            return [absolute(one) for one in kernel]
        is_file = isinstance(kernel, str) and ("/" in kernel or ".so" in kernel or ".fatbin" in kernel)
        return os.path.join(os.getcwd(), kernel) if is_file else kernel

    services = config.get("service", [])
    if not isinstance(services, list) or not all(isinstance(service, Mapping) for service in services):
        raise ConfigError("`service` has to be a list of tables")
    changed = [{**service, "kernel": absolute(service["kernel"])} if "kernel" in service else service for service in services]
    return {**config, "service": changed}


_live: weakref.WeakSet[Engine] = weakref.WeakSet()


def _close_all() -> None:
    for engine in list(_live):
        engine.close()


def _after_fork() -> None:
    for engine in list(_live):
        engine._forget()
    _live.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_after_fork)


def wait_for(condition: Callable[[], bool], timeout: float) -> bool:
    """Asks again and again whether a condition holds, for at most ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.002)
    return True
