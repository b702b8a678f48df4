"""Functions on the path of a running server's messages: created, attached, commanded and destroyed from Python.

>>> from serval import functions
>>> with functions.create(server, "threshold", "limits", params={"offset": 0}) as limits:
...     with limits.attach("digits"):
...         limits.write("high", 200)

A function belongs to the user of this process, and ends with it: with the connection to the server that :func:`create` opens. With ``keep=True`` it
stays until it is destroyed. The page docs/functions.md of Serval says what functions do.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import stat
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NamedTuple

from ._engine import Engine
from ._errors import EngineError

__all__ = ["Attachment", "CustomRing", "Delivered", "Function", "create", "list_functions"]

_ANSWER_BYTES_MAX = 1 << 20
_MODULE_BYTES_MAX = 8 << 20
#: How long an answer may take: a module is compiled, and a worker may be inside a kernel.
_PATIENCE = 90.0


def create(
    server: Engine | str | os.PathLike[str],
    function: str | os.PathLike[str],
    name: str,
    *,
    params: Mapping[str, int | str] | None = None,
    on_failure: str = "closed",
    deadline_us: int | None = None,
    memory_mib: int | None = None,
    dictionary: str | None = None,
    dictionary_kib: int | None = None,
    keep: bool = False,
) -> Function:
    """Creates a function in a running server: a built-in one, or the path of a WebAssembly module, which ends in ``.wasm``.

    ``server`` is an :class:`serval.Engine`, or the path of a control socket. The function is attached to nothing; its name is one that no other function
    has that this user has created. A module that uses a dictionary needs its name: functions of this user on services of one tenant that name the same
    ``dictionary`` share it, and all give the same ``dictionary_kib``.
    """
    function = os.fspath(function)
    is_module = function.endswith(".wasm")
    request: dict[str, Any] = {
        "name": name,
        "function": os.path.abspath(function) if is_module else function,
        "params": dict(params or {}),
        "on_failure": on_failure,
        "bound": not keep,
    }
    if deadline_us is not None:
        request["deadline_us"] = deadline_us
    if memory_mib is not None:
        request["memory_mib"] = memory_mib
    if dictionary is not None:
        request["dictionary"] = dictionary
    if dictionary_kib is not None:
        request["dictionary_kib"] = dictionary_kib
    connection = _Connection(_path(server), lasting=not keep)
    try:
        answer = connection.ask("create", request, function if is_module else None)
        number = answer.get("id")
        if not isinstance(number, int):
            raise EngineError(f"the server at {connection.path} does not give the function's id")
    except BaseException:
        connection.close()
        raise
    return Function(connection, number, name)


def list_functions(server: Engine | str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All functions that this user may see, as the server describes them."""
    connection = _Connection(_path(server), lasting=False)
    return list(connection.ask("list", {}).get("functions", []))


class Function:
    """A function in a running server. As a context manager it is detached and destroyed at the end."""

    def __init__(self, connection: _Connection, number: int, name: str) -> None:
        self._connection = connection
        #: The number by which the server knows it. No other function gets it.
        self.id = number
        #: Its name.
        self.name = name
        self._attached = False
        self._destroyed = False

    def ring(self, entries: int = 1024, message_bytes: int = 2048) -> CustomRing:
        """Gives the function, which is not attached, a ring in shared memory for the requests that it delivers.

        The ring has ``entries`` places for each worker of the server, a power of two up to 16384. It replaces the one that the function has.
        """
        request = {"id": self.id, "entries": entries, "message_bytes": message_bytes}
        files: list[int] = []
        self._connection.ask("ring", request, files=files)
        if len(files) != 2:
            for file in files:
                os.close(file)
            raise EngineError(f"the server at {self._connection.path} sent no ring")
        return CustomRing(files[0], files[1])

    def attach(
        self,
        service: str,
        *,
        place: int | None = None,
        before: str | None = None,
        after: str | None = None,
    ) -> Attachment:
        """Attaches it to a service: at the end of its chain, at a place that is counted from 0, or beside another function.

        The result can be used as a context manager, which detaches it at the end.
        """
        where = {"place": place, "before": before, "after": after}
        given = {key: value for key, value in where.items() if value is not None}
        self._ask("attach", {"service": service, **given})
        self._attached = True
        return Attachment(self)

    def read(self) -> dict[str, int]:
        """The values of all registers, merged over all workers."""
        return self._registers("read", {})

    def reset(self) -> dict[str, int]:
        """Gives all registers that are no settings their first values, and reads all."""
        return self._registers("reset", {})

    def write(self, setting: str, value: int) -> dict[str, int]:
        """Writes a setting on all workers, and reads all registers."""
        return self._registers("write", {"register": setting, "value": value})

    def replace(
        self,
        function: str | os.PathLike[str] | None = None,
        *,
        params: Mapping[str, int | str] | None = None,
        on_failure: str | None = None,
    ) -> None:
        """Gives it other code, other parameters or another policy. Parameters and the policy alone keep its registers."""
        request: dict[str, Any] = {}
        module = None
        if function is not None:
            request["function"] = os.fspath(function)
            if request["function"].endswith(".wasm"):
                module = request["function"]
                request["function"] = os.path.abspath(module)
        if params is not None:
            request["params"] = dict(params)
        if on_failure is not None:
            request["on_failure"] = on_failure
        self._ask("replace", request, module)

    def detach(self) -> None:
        """Detaches it. It can be attached again, with the settings that it has."""
        self._ask("detach", {})
        self._attached = False

    def destroy(self) -> None:
        """Detaches it if it is attached, and destroys it."""
        if self._destroyed:
            return
        try:
            if self._attached:
                self.detach()
            self._ask("destroy", {})
        finally:
            self._destroyed = True
            self._connection.close()

    def _registers(self, verb: str, request: dict[str, Any]) -> dict[str, int]:
        return dict(self._ask(verb, request).get("registers", {}))

    def _ask(
        self, verb: str, request: dict[str, Any], module: str | None = None
    ) -> dict[str, Any]:
        return self._connection.ask(verb, {"id": self.id, **request}, module)

    def __enter__(self) -> Function:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.destroy()


class Attachment:
    """An attachment of a function; as a context manager it is detached at the end, unless it is already."""

    def __init__(self, function: Function) -> None:
        #: The function.
        self.function = function

    def __enter__(self) -> Function:
        return self.function

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.function._attached:
            self.function.detach()


class Delivered(NamedTuple):
    """A request that a function has delivered."""

    #: Its bytes.
    message: bytes
    #: The worker that received it. Requests of one worker are in order.
    worker: int
    #: Its number on this worker, from 0. Those that are missing found no room, and were dropped as ``ring_full``.
    number: int
    #: The address of its client, if it came as a datagram over IPv4.
    client: tuple[str, int] | None


class CustomRing:
    """The requests that a function delivers to this process, in shared memory. As a context manager it is closed at the end.

    Reading gives places back. A request that finds no room is dropped and counted.
    """

    def __init__(self, region: int, bell: int) -> None:
        from ._native import Ring

        try:
            self._ring = Ring(region, bell)
        except RuntimeError as error:
            raise EngineError(str(error)) from None

    def read(self, most: int = 256, timeout: float = 0.0) -> list[Delivered]:
        """Up to ``most`` requests, of one worker after the other; waits up to ``timeout`` seconds for the first one."""
        try:
            return [Delivered(*found) for found in self._ring.read(most, timeout)]
        except RuntimeError as error:
            raise EngineError(str(error)) from None

    def close(self) -> None:
        """Gives the memory back. Then nothing more can be read."""
        self._ring.close()

    def __enter__(self) -> CustomRing:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _path(server: Engine | str | os.PathLike[str]) -> str:
    return server.control if isinstance(server, Engine) else os.fspath(server)


class _Connection:
    """Requests to a control socket: over one connection, with which functions end, or over one for each request."""

    def __init__(self, path: str, *, lasting: bool) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._socket = self._connect() if lasting else None

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.settimeout(_PATIENCE)
            connection.connect(self.path)
        except OSError as error:
            connection.close()
            raise EngineError(f"no server answers at {self.path}: {error}") from None
        return connection

    def ask(
        self,
        verb: str,
        request: dict[str, Any],
        module: str | None = None,
        files: list[int] | None = None,
    ) -> dict[str, Any]:
        """One request, with the content of a module if there is one. Descriptors in the answer go to ``files``, or are closed."""
        line = json.dumps({"command": "functions", "do": verb, **request}).encode() + b"\n"
        copies = [] if module is None else [_sealed_copy(module)]
        received: list[int] = [] if files is None else files
        try:
            with self._lock:
                connection = self._socket or self._connect()
                try:
                    socket.send_fds(connection, [line], copies)
                    got, descriptors, _, _ = socket.recv_fds(connection, _ANSWER_BYTES_MAX, 4)
                    received.extend(descriptors)
                finally:
                    if connection is not self._socket:
                        connection.close()
            answer = json.loads(got) if got else {"error": f"the server at {self.path} ended"}
        except (OSError, ValueError) as error:
            raise EngineError(f"the server at {self.path} does not answer: {error}") from None
        finally:
            for file in copies if files is not None else copies + received:
                os.close(file)
        if not isinstance(answer, dict):
            raise EngineError(f"the server at {self.path} does not answer: {answer!r}")
        if "error" in answer:
            raise EngineError(str(answer["error"]))
        return answer

    def close(self) -> None:
        with self._lock:
            if self._socket is not None:
                self._socket.close()


def _sealed_copy(path: str) -> int:
    """A sealed copy of a module, as a descriptor: the server opens no files for other users."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise EngineError(f"the module {path} is not a file")
            content = file.read(_MODULE_BYTES_MAX + 1)
    except OSError as error:
        raise EngineError(f"the module {path} cannot be read: {error}") from None
    if len(content) > _MODULE_BYTES_MAX:
        raise EngineError(f"the module {path} has more than {_MODULE_BYTES_MAX} bytes")
    copy = os.memfd_create("serval:module", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(copy, "wb", closefd=False) as file:
            file.write(content)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(copy, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(copy)
        raise
    return copy
