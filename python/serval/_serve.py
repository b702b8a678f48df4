"""Serves a Python function: a host call."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from . import _errors
from ._engine import Engine, make_folder, remove_folder, wait_for
from ._errors import ConfigError, EngineError, Error, ErrorReply, FunctionError

if TYPE_CHECKING:
    from ._arrays import Arrays
    from ._metrics import Metrics
    from ._native import HostCall
    from ._types import Reply

_log = logging.getLogger("serval")
#: Seconds until a call that has not returned is left behind when a server closes.
_RETURN_PATIENCE = 1.0
#: Seconds until an engine answers.
_ATTACH_PATIENCE = 10.0
#: Half of the longest `request_timeout_ms`, in seconds.
_CALL_TIMEOUT_MAX = 1800

#: What happens after a function failed: ``"drop"`` logs the error once and goes on, ``"stop"`` ends the server with the error, and a
#: function is called with each error and the server goes on: on the thread of the served function, with a :class:`CallTimeout` on another.
OnError = Any


def serve(
    function: Callable[[Any], Any],
    *,
    listen: str | Sequence[str] = (),
    attach: str | os.PathLike[str] | None = None,
    batch: int = 64,
    max_delay_us: int = 50,
    idle_us: int | None = None,
    dtype: Any = None,
    shape: Sequence[int] = (),
    reply_dtype: Any = None,
    reply_shape: Sequence[int] | None = None,
    framing: str = "length:u32",
    max_message_bytes: int | None = None,
    max_reply_bytes: int | None = None,
    call_timeout: float = 10.0,
    on_error: OnError = "drop",
    name: str | None = None,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
) -> Server:
    """Serves ``function`` on network ports. Returns when requests are answered; they are until the server is closed.

    >>> with serval.serve(lambda messages: [m.upper() for m in messages], listen="udp://127.0.0.1:9000") as server:
    ...     server.wait()

    The function is called on a thread of its own with a list of at most ``batch`` messages (``bytes``) and returns as many replies
    (bytes-like; ``None``: no reply is wanted). With ``dtype`` it is called with a NumPy array of shape ``(messages, *shape)`` and
    returns an array whose first dimension is that of the messages.

    A function that fails with a batch is called again with each of its messages alone. Those with which it fails alone get no reply and are counted as
    ``kernel_drop`` (a reply that is too long: ``reply_too_long``), see ``on_error``. So it may see a message twice. In the place of a single reply it
    may return an exception, which drops this message in the same way, or an :class:`ErrorReply`.

    :param listen: one or more of ``udp://IP:PORT``, ``tcp://IP:PORT`` and ``shm:///PATH``. For port 0 the host kernel chooses; see
        :attr:`Server.urls`.
    :param attach: instead of ``listen``: the socket of an accelerator of a running engine (``launch = "external"``).
    :param batch: messages of a call, 1 to 16384.
    :param max_delay_us: a batch closes this many microseconds after its first message, 0 to 1000000.
    :param idle_us: a batch closes when no message has arrived for this long (default: a fifth of ``max_delay_us``).
    :param dtype: dtype of the messages, such as ``"float32"`` or ``"<f4"``. Messages of another length than ``shape`` has are dropped
        as ``bad_length``.
    :param shape: shape of one message; ``()``: a scalar.
    :param reply_dtype: dtype of the replies (default: ``dtype``).
    :param reply_shape: shape of one reply (default: any).
    :param framing: how messages are delimited on TCP connections.
    :param max_message_bytes: longest message (default: 1024, with ``dtype`` the size of a message).
    :param max_reply_bytes: longest reply (default: ``max_message_bytes``, with ``reply_shape`` the size of a reply).
    :param call_timeout: seconds after which a call is reported and its messages are dropped, 0.001 to 1800.
    :param on_error: ``"drop"``, ``"stop"`` or a function; see :data:`OnError`.
    :param name: the service in metrics and logs (default: the name of the function). With ``attach``: the service to serve (default: any).
    :param settings: further keys of the configuration, such as ``{"limits": {"pipelined": 256}, "service": {"slots": 4096}}``.
    :raises ConfigError: an argument is wrong.
    :raises EngineError: the engine could not start, or no engine answers at ``attach``.
    """
    listens = [listen] if isinstance(listen, str) else list(listen)
    if bool(listens) == (attach is not None):
        raise ConfigError("give either `listen` or `attach`")
    if not callable(function):
        raise ConfigError(f"the function is {_errors.describe(function)}, which cannot be called")
    if not (on_error in ("drop", "stop") or callable(on_error)):
        raise ConfigError(f'on_error is {on_error!r}, must be "drop", "stop" or a function')
    _check("batch", batch, 1, 16384)
    _check("max_delay_us", max_delay_us, 0, 1_000_000)
    idle_us = max_delay_us // 5 if idle_us is None else idle_us
    _check("idle_us", idle_us, 0, 1_000_000)
    if not 0.001 <= call_timeout <= _CALL_TIMEOUT_MAX:
        raise ConfigError(f"call_timeout is {call_timeout} s, must be in [0.001, {_CALL_TIMEOUT_MAX}]")
    arrays = None
    if dtype is not None:
        from ._arrays import Arrays

        arrays = Arrays(dtype, shape, reply_dtype, reply_shape)
        max_message_bytes = max_message_bytes or max(arrays.row_bytes, 1)
        max_reply_bytes = max_reply_bytes or arrays.reply_bytes
    elif shape or reply_dtype is not None or reply_shape is not None:
        raise ConfigError("`shape`, `reply_dtype` and `reply_shape` need `dtype`")
    service: dict[str, Any] = {
        "name": name or _service_name(function),
        "listen": listens,
        "framing": framing,
        "accelerator": "python",
        "kernel": "python",
        "mqueues": 1,
        "slots": _slots(batch),
        "max_message_bytes": max_message_bytes or 1024,
        "max_reply_bytes": max_reply_bytes or max_message_bytes or 1024,
        "request_timeout_ms": max(1000, round(2000 * call_timeout)),
    }
    return Server(
        function,
        arrays,
        None if attach is not None else _config(service, settings or {}),
        os.fspath(attach) if attach is not None else None,
        name or "" if attach is not None else service["name"],
        (batch, max_delay_us, idle_us, round(1000 * call_timeout)),
        on_error,
    )


def _check(name: str, value: int, least: int, most: int) -> None:
    if not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"{name} is {value!r}, must be an integer in [{least}, {most}]")


def _function_name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _service_name(function: Callable[..., Any]) -> str:
    name = _function_name(function)
    kept = "".join(c for c in name if c.isascii() and (c.isalnum() or c in "_-"))
    return kept[:64] or "python"


def _slots(batch: int) -> int:
    """So many that the next batches arrive during a call."""
    slots = 1024
    while slots < 8 * batch and slots < 16384:
        slots *= 2
    return slots


def _config(service: dict[str, Any], settings: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    unknown = set(settings) - {"engine", "limits", "service"}
    if unknown:
        raise ConfigError(f"settings has {sorted(unknown)}: there are engine, limits and service")
    return {
        "schema": 1,
        "engine": dict(settings.get("engine", {})),
        "limits": dict(settings.get("limits", {})),
        "accelerator": [{"name": "python", "kind": "process", "launch": "external"}],
        "service": [{**service, **settings.get("service", {})}],
    }


class Server:
    """A served function; made by :func:`serve`. Usable in ``with``, which closes it."""

    def __init__(
        self,
        function: Callable[[Any], Any],
        arrays: Arrays | None,
        config: dict[str, Any] | None,
        attach: str | None,
        service: str,
        limits: tuple[int, int, int, int],
        on_error: OnError,
    ) -> None:
        self._function = function
        #: In messages.
        self._called = f"the function {_function_name(function)}"
        self._arrays = arrays
        self._call_timeout = limits[3] / 1000
        self._on_error = on_error
        self._service = service
        self._error: BaseException | None = None
        self._errors: dict[str, int] = {}
        self._retried = 0
        self._counting = threading.Lock()
        self._closing = threading.RLock()
        self._closed = False
        self._over = threading.Event()
        self._serving = threading.Event()
        self._folder: str | None = None
        self._host: HostCall | None = None
        #: When the host call is gone.
        self._last_counters = dict.fromkeys(_COUNTERS, 0)
        self._last_params: dict[str, float | str] = {}
        self._threads: list[threading.Thread] = []
        #: The engine that this server started; ``None`` if it attached to a running one.
        self.engine: Engine | None = None
        #: The last error of the function.
        self.last_error: FunctionError | None = None
        try:
            self._start(config, attach, limits)
        except BaseException:
            self.close()
            raise

    def _start(self, config: dict[str, Any] | None, attach: str | None, limits: tuple[int, int, int, int]) -> None:
        if config is not None:
            self._folder = make_folder()
            attach = os.path.join(self._folder, "attach.sock")
            config["accelerator"][0]["attach"] = attach
            self.engine = Engine(config)
        assert attach is not None
        # Only programs that serve load the native module.
        from ._native import HostCall

        host = self._host = HostCall(attach, self._service, *limits)
        self._threads = [
            threading.Thread(target=self._call, args=(host,), daemon=True, name=f"serval-call-{self._service}"),
            threading.Thread(target=self._watch, args=(host,), daemon=True, name="serval-watch"),
        ]
        for thread in self._threads:
            thread.start()
        _live.add(self)
        if self.engine is not None:
            self.engine._on_end = self._engine_ended
            if self.engine.exit_code is not None:
                self._engine_ended()
        if not self._serving.wait(_ATTACH_PATIENCE):
            raise EngineError(f"no engine at {attach} offers a service within {_ATTACH_PATIENCE:.0f} s")
        if self._error is None and self.engine is not None:
            engine = self.engine
            up = wait_for(lambda: engine.metrics().total("serval_accelerator_up") > 0, _ATTACH_PATIENCE)
            if not up:
                raise EngineError(f"the engine did not accept the function within {_ATTACH_PATIENCE:.0f} s")
        if self._error is not None:
            raise self._error

    # The loops around the function. No native frame is below the function.

    def _call(self, host: HostCall) -> None:
        try:
            if self._arrays:
                self._call_with_arrays(host, self._arrays)
            else:
                self._call_with_lists(host)
        except BaseException as error:  # noqa: BLE001 - a service without this thread answers nothing
            failure = Error(f"the thread of service {self._service} failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._stop(failure)

    def _call_with_lists(self, host: HostCall) -> None:
        while (messages := host.next()) is not None:
            # The function may change its list.
            kept = tuple(messages)
            replies = self._replies(messages, len(kept))
            if isinstance(replies, Exception):
                self._failed(host, replies, len(kept), lambda index: self._answer_alone(host, index, kept[index]))
            else:
                for wrong in host.reply(replies) or ():
                    self._refuse(host, wrong[0], self._wrong_reply(wrong))

    def _call_with_arrays(self, host: HostCall, arrays: Arrays) -> None:
        while (batch := host.next_rows(arrays.row_bytes)) is not None:
            count = batch[1]
            replies = self._rows(arrays, *batch)
            if isinstance(replies, Exception):
                self._failed(host, replies, count, lambda index: self._answer_row_alone(host, index, arrays))
            elif (wrong := host.reply_rows(replies, count)) is not None:
                # All rows have this length, so no message alone would do better.
                for index in range(count):
                    host.drop_at(index, True)
                self._report(self._too_long(wrong, count, replies), count)

    def _replies(self, messages: list[bytes], count: int) -> list[Reply] | tuple[Reply, ...] | Exception:
        """What the function returns for these messages, one for each; or why it failed."""
        try:
            replies = self._function(messages)
        except BaseException as error:  # noqa: BLE001 - also SystemExit: it would end this thread silently
            return self._raised(error, count)
        # The methods of other types, also of subclasses, are the user's: they run only here.
        if type(replies) not in (list, tuple):
            try:
                if isinstance(replies, (str, bytes, bytearray, memoryview)):
                    raise TypeError
                iterator = iter(replies)
            except BaseException:  # noqa: BLE001
                text = f"{self._called} returned {_errors.describe(replies)}, not a list of replies"
                return _errors.ReplyTypeError(text, messages=count)
            try:
                # It may go on for ever.
                replies = list(itertools.islice(iterator, count + 1))
            except BaseException as error:  # noqa: BLE001
                return self._raised(error, count)
            if len(replies) > count:
                text = f"{self._called} returned more than {count} replies to {count} messages, which were read no further"
                return _errors.ReplyCountError(text, messages=count)
        if len(replies) != count:
            text = f"{self._called} returned {len(replies)} replies to {count} messages"
            return _errors.ReplyCountError(text, messages=count)
        found: list[Reply] | tuple[Reply, ...] = replies
        return found

    def _rows(self, arrays: Arrays, rows: bytearray, count: int) -> Any:
        """The array that the function returns for these messages, as rows; or why it failed."""
        try:
            replies = self._function(arrays.array(rows, count))
        except BaseException as error:  # noqa: BLE001
            return self._raised(error, count)
        try:
            return arrays.rows(replies, count)
        except FunctionError as error:
            return error.with_traceback(None)
        except BaseException as error:  # noqa: BLE001 - the methods of a subclass of ndarray are the user's
            return self._raised(error, count)

    def _failed(self, host: HostCall, error: Exception, count: int, alone: Callable[[int], bool]) -> None:
        """The function failed with a batch. It is called again with each message alone (``alone``, which returns whether it is answered), so
        that only those with which it fails are lost."""
        if count == 1:
            return self._refuse(host, 0, error)
        failed = 0
        # What waits longer has been given up by the engine: `serve` sets request_timeout_ms to twice this limit.
        deadline = time.monotonic() + 2 * self._call_timeout
        for index in range(count):
            if time.monotonic() > deadline:
                for late in range(index, count):
                    self._refuse(host, late, error)
                return
            # A server that ends, or an engine that has given the batch up, needs no more answers.
            if self._error is not None or not host.call_again():
                return
            self._retried += 1
            failed += not alone(index)
        if not failed and isinstance(error, FunctionError):
            self._report(error, 0)

    def _answer_alone(self, host: HostCall, index: int, message: bytes) -> bool:
        replies = self._replies([message], 1)
        if not isinstance(replies, Exception):
            wrong = host.reply_at(index, replies[0])
            if wrong is None:
                return True
            replies = self._wrong_reply(wrong)
        self._refuse(host, index, replies)
        return False

    def _answer_row_alone(self, host: HostCall, index: int, arrays: Arrays) -> bool:
        reply = self._rows(arrays, host.row(index, arrays.row_bytes), 1)
        if not isinstance(reply, Exception):
            wrong = host.reply_at(index, reply)
            if wrong is None:
                return True
            reply = self._too_long(wrong, 1, reply)
        self._refuse(host, index, reply)
        return False

    def _refuse(self, host: HostCall, index: int, error: Exception) -> None:
        """Ends a message with which the function failed: with its error reply if it has one, else it is dropped."""
        if isinstance(error, ErrorReply):
            # A subclass may lack it.
            wrong = host.reply_at(index, getattr(error, "reply", error))
            if wrong is None:
                with self._counting:
                    self._errors["ErrorReply"] = self._errors.get("ErrorReply", 0) + 1
                return
            error = self._wrong_reply(wrong)
        if not isinstance(error, FunctionError):
            text = f"{self._called} gave an ErrorReply whose reply is {_errors.describe(error)}, not bytes-like"
            error = _errors.ReplyTypeError(text, messages=1)
        error.index = index
        host.drop_at(index, isinstance(error, _errors.ReplyTooLong))
        self._report(error, 1)

    def _raised(self, error: BaseException, count: int) -> Exception:
        """The error for an exception of the function; an error reply to a single message is its own."""
        if isinstance(error, ErrorReply) and count == 1:
            return error
        arrays = self._arrays
        if error.__traceback__ is not None:
            # The frame of the loop is of no interest.
            error.__traceback__ = error.__traceback__.tb_next
        failure = _errors.FunctionRaised(
            f"{self._called} raised {_described(error)}",
            messages=count,
            shape=(count, *arrays.shape) if arrays else None,
            dtype=str(arrays.dtype) if arrays else None,
        )
        failure.__cause__ = error
        return failure

    def _wrong_reply(self, wrong: tuple[Any, ...]) -> Exception:
        """The error for a reply that the native module does not send, see `HostCall::reply`."""
        if len(wrong) == 3:
            return self._too_long(wrong, 1)
        reply = wrong[1]
        if isinstance(reply, ErrorReply):
            return reply
        if isinstance(reply, BaseException):
            failure = _errors.FunctionRaised(f"{self._called} returned {_described(reply)} for a message", messages=1)
            failure.__cause__ = reply
            return failure
        text = f"{self._called} returned a reply that is {_errors.describe(reply)}, not bytes-like"
        return _errors.ReplyTypeError(text, messages=1)

    def _too_long(self, wrong: tuple[Any, ...], count: int, array: Any = None) -> FunctionError:
        return _errors.ReplyTooLong(
            f"{self._called} returned a reply of {wrong[1]} bytes, max_reply_bytes is {wrong[2]}",
            messages=count,
            shape=tuple(array.shape) if array is not None else None,
            dtype=str(array.dtype) if array is not None else None,
        )

    def _report(self, error: FunctionError, lost: int) -> None:
        """Counts an error of the function that cost ``lost`` messages, and logs it the first time and then at every power of two."""
        kind = type(error).__name__
        # The watching thread reports calls that take too long.
        with self._counting:
            count = self._errors[kind] = self._errors.get(kind, 0) + 1
            self.last_error = error
        if callable(self._on_error):
            try:
                self._on_error(error)
            except BaseException as second:  # noqa: BLE001
                _log.error("on_error of service %s failed", self._service, exc_info=second)
        elif self._on_error == "stop":
            self._stop(error)
        elif count & (count - 1) == 0:
            again = f" ({count} times)" if count > 1 else ""
            dropped = {0: "each message alone was answered", 1: "the message is dropped"}.get(lost, f"{lost} messages are dropped")
            _log.error("service %s: %s%s; %s", self._service, error, again, dropped, exc_info=error)

    def _stop(self, error: BaseException) -> None:
        """Ends the server with an error, from any of its threads: the watching thread closes it."""
        if self._error is None:
            self._error = error
        if self._host is not None:
            self._host.close()

    def _engine_ended(self) -> None:
        engine = self.engine
        assert engine
        text = f"the engine of service {self._service} ended by itself (exit code {engine.exit_code})\n{engine.log}"
        self._stop(EngineError(text.rstrip(), exit_code=engine.exit_code, log=engine.log))

    def _watch(self, host: HostCall) -> None:
        """Waits for events of the host call until the server is closed or has failed."""
        poll = select.poll()
        poll.register(host.event_fd(), select.POLLIN)
        overdue = 0
        while True:
            poll.poll()
            host.clear_event()
            counters = host.counters()
            if counters["generations"] > 0:
                self._serving.set()
            if counters["overdue"] > overdue:
                overdue = counters["overdue"]
                text = f"a call of {self._called} takes longer than {self._call_timeout} s"
                left = counters["messages"] - _answered(counters)
                self._report(_errors.CallTimeout(text, messages=left), max(left, 1))
            failure = host.failure()
            if failure is not None:
                self._stop(EngineError(failure))
            if self._error is not None or self._closed:
                break
        self._serving.set()
        if self._error is not None:
            self.close()

    @property
    def urls(self) -> list[str]:
        """The addresses where clients reach the function, with the ports that the host kernel chose."""
        return self.engine.urls.get(self._service, []) if self.engine else []

    @property
    def url(self) -> str:
        """The first of :attr:`urls`."""
        return self.urls[0]

    def stats(self) -> dict[str, Any]:
        """Counters of this server: ``messages`` and ``replies``; ``calls`` and ``closed``, the batches by why they closed; ``dropped``
        by reason; ``retried``, the messages that the function was called with again, alone; ``errors`` by type."""
        counters = self._host.counters() if self._host is not None else self._last_counters
        closed = {why: counters[why] for why in ("full", "delay", "idle")}
        return {
            "messages": counters["messages"],
            "replies": counters["replies"],
            "consumed": counters["consumed"],
            "calls": sum(closed.values()),
            "closed": closed,
            "dropped": {
                "kernel_drop": counters["rejected"],
                "bad_length": counters["bad_length"],
                "reply_too_long": counters["too_long"],
            },
            "retried": self._retried,
            "errors": dict(self._errors),
            "generations": counters["generations"],
        }

    @property
    def params(self) -> dict[str, float | str]:
        """The parameters that the engine's configuration gives the service (``params``); none before it has started."""
        host = self._host
        if host is not None:
            self._last_params = host.params()
        return dict(self._last_params)

    def metrics(self) -> Metrics:
        """All counters of the engine; see :meth:`Engine.metrics`."""
        if self.engine is None:
            raise EngineError("this server attached to an engine of others: ask that engine")
        return self.engine.metrics()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the server has ended, which :meth:`close` from another thread or an error causes. Returns whether it has.

        :raises Error: the error with which it ended.
        """
        if not self._over.wait(timeout):
            return False
        if self._error is not None:
            raise self._error
        return True

    def close(self) -> None:
        """Answers the requests that were accepted and ends the server. May be called again, and from any thread but the function's."""
        with self._closing:
            if self._over.is_set():
                return
            # An exception, such as KeyboardInterrupt, may end this anywhere: the next call does the rest.
            if self.engine is not None:
                self.engine.close()
            self._closed = True
            if self._host is not None:
                self._host.close()
                self._host.detach(_RETURN_PATIENCE + 1.0)
            for thread in self._threads:
                if thread is not threading.current_thread() and thread.ident is not None:
                    thread.join(_RETURN_PATIENCE)
            if self._threads and self._threads[0].is_alive() and self._threads[0] is not threading.current_thread():
                _log.error("service %s: a call of the function has not returned and is left behind", self._service)
            if self._host is not None:
                host, self._last_counters = self._host, self._host.counters()
                self._last_params = host.params()
                self._host = None
                host.release()
            self._threads = []
            if self._folder is not None:
                remove_folder(self._folder)
            _live.discard(self)
            self._over.set()

    def __repr__(self) -> str:
        state = "closed" if self._over.is_set() else "serving"
        return f"<serval.Server {self._service} {' '.join(self.urls)} {state}>"

    def _forget(self) -> None:
        """In a child process after a fork: the server belongs to the parent."""
        self._closed = True
        # Other threads may have held the locks of the old ones at the fork.
        self._closing, self._over = threading.RLock(), threading.Event()
        self._over.set()

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if error is None and self._error is not None:
            raise self._error


_COUNTERS = (
    "full delay idle messages replies consumed rejected bad_length too_long generations overdue".split()
)


def _answered(counters: Mapping[str, int]) -> int:
    return sum(counters[name] for name in ("replies", "consumed", "rejected", "bad_length", "too_long"))


def _described(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:  # noqa: BLE001 - its `__str__` is the user's
        return type(error).__name__


_live: weakref.WeakSet[Server] = weakref.WeakSet()


def _close_all() -> None:
    for server in list(_live):
        server.close()


def _after_fork() -> None:
    for server in list(_live):
        server._forget()
    _live.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_after_fork)
