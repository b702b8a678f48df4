"""Calls on the socket of a TLS connection whose records the preloaded library makes: what another end of OpenSSL reads is what was written, or the
call fails. `tls_calls.py CERTIFICATE FILE VERSION`."""

import ctypes
import errno
import fcntl
import os
import select
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time

PATIENCE = 60
certificate, file_name, version = sys.argv[1:]
signal.alarm(2 * PATIENCE)
content = open(file_name, "rb").read()
libc = ctypes.CDLL(None, use_errno=True)


def context(kind):
    made = ssl.SSLContext(kind)
    made.minimum_version = made.maximum_version = getattr(ssl.TLSVersion, version)
    return made


server_context = context(ssl.PROTOCOL_TLS_SERVER)
server_context.load_cert_chain(certificate)
server_context.options |= 1 << 3  # SSL_OP_ENABLE_KTLS
client_context = context(ssl.PROTOCOL_TLS_CLIENT)
client_context.check_hostname, client_context.verify_mode = False, ssl.CERT_NONE


def pair(send_buffer=0, prepare=lambda end: None):
    """The server's end, whose records the library makes, and the client's."""
    listener = socket.create_server(("127.0.0.1", 0))
    if send_buffer:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    client = client_context.wrap_socket(socket.create_connection(listener.getsockname()), do_handshake_on_connect=False)
    server = server_context.wrap_socket(listener.accept()[0], server_side=True, do_handshake_on_connect=False)
    prepare(server)
    # Without a second thread: a process that is forked beside one may find locks of OpenSSL taken.
    ends = [client, server]
    for end in ends:
        end.setblocking(False)
    limit = time.monotonic() + PATIENCE
    while ends:
        assert time.monotonic() < limit
        try:
            ends[0].do_handshake()
            del ends[0]
        except ssl.SSLWantReadError:
            ends.reverse()
    server.setblocking(True)
    client.settimeout(PATIENCE)
    return server, client


def expect(client, expected):
    got = bytearray()
    while len(got) < len(expected):
        now = client.recv(1 << 20)
        assert now, (len(got), len(expected))
        got += now
    assert bytes(got) == bytes(expected), "other bytes"


def fails(number, call, *arguments):
    try:
        call(*arguments)
    except OSError as error:
        assert error.errno == number, error
    else:
        raise AssertionError(call)


def beside(work, *arguments):
    """Reads while the caller writes."""
    failed = []

    def run():
        try:
            work(*arguments)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def wait():
        thread.join()
        if failed:
            raise failed[0]

    return wait


def every_call():
    server, client = pair()
    fd = server.fileno()
    server.sendall(b"by OpenSSL")
    expect(client, b"by OpenSSL")
    # Not by OpenSSL: plain bytes that the library seals.
    assert os.write(fd, b"write") == 5
    assert os.writev(fd, [b"wri", b"", b"tev"]) == 6
    plain = socket.socket(fileno=os.dup(fd))
    assert plain.send(b"send", socket.MSG_NOSIGNAL | socket.MSG_MORE) == 4
    assert plain.sendto(b"sendto", plain.getpeername()) == 6
    assert plain.sendmsg([b"send", b"msg"]) == 7
    expect(client, b"writewritevsendsendtosendmsg")
    with open(file_name, "rb") as source:
        wait = beside(expect, client, content + content[7:1007] + content[:100])
        at = 0
        while at < len(content):
            at += os.sendfile(fd, source.fileno(), at, len(content))
        assert os.sendfile(fd, source.fileno(), 7, 1000) == 1000
        assert os.sendfile(fd, source.fileno(), None, 100) == 100 and source.tell() == 100
        wait()
    fails(errno.EOPNOTSUPP, plain.send, b"x", socket.MSG_OOB)
    read, write = os.pipe()
    os.write(write, b"x")
    fails(errno.EOPNOTSUPP, os.splice, read, fd, 1)
    for call, *arguments in [(libc.dprintf, b"x"), (libc.fdopen, b"w"), (getattr(libc, "__dprintf_chk"), 1, b"x")]:
        ctypes.set_errno(0)
        assert call(fd, *arguments) in (-1, 0) and ctypes.get_errno() == errno.EOPNOTSUPP, call
    class Vector(ctypes.Structure):
        _fields_ = [("base", ctypes.c_void_p), ("bytes", ctypes.c_size_t)]

    class Header(ctypes.Structure):
        _fields_ = [("name", ctypes.c_void_p), ("name_bytes", ctypes.c_uint), ("parts", ctypes.c_void_p), ("count", ctypes.c_size_t),
                    ("control", ctypes.c_void_p), ("control_bytes", ctypes.c_size_t), ("flags", ctypes.c_size_t), ("sent", ctypes.c_size_t)]

    class Asynchronous(ctypes.Structure):
        _fields_ = [("fd", ctypes.c_int), ("operation", ctypes.c_int), ("priority", ctypes.c_int), ("buffer", ctypes.c_void_p),
                    ("bytes", ctypes.c_size_t), ("rest", ctypes.c_char * 200)]

    text = ctypes.create_string_buffer(b"abc")
    parts = (Vector * 2)(Vector(ctypes.addressof(text), 1), Vector(ctypes.addressof(text) + 1, 2))
    at = ctypes.addressof(parts)
    messages = (Header * 2)(Header(None, 0, at, 1), Header(None, 0, at + ctypes.sizeof(Vector), 1))
    assert libc.sendmmsg(fd, messages, 2, 0) == 2 and [message.sent for message in messages] == [1, 2]
    expect(client, b"abc")
    # LIO_WRITE to the connection, behind a LIO_NOP; LIO_WAIT.
    nothing, command = Asynchronous(fd, 2), Asynchronous(fd, 1, 0, ctypes.addressof(text), 3)
    commands = (ctypes.c_void_p * 2)(ctypes.addressof(nothing), ctypes.addressof(command))
    for call, *arguments in [
        (libc.pwritev2, fd, parts, 2, ctypes.c_long(-1), 0), (libc.pwritev64v2, fd, parts, 2, ctypes.c_long(-1), 0),
        (libc.aio_write, ctypes.byref(command)), (libc.aio_write64, ctypes.byref(command)),
        (libc.lio_listio, 0, commands, 2, None), (libc.lio_listio64, 0, commands, 2, None),
        (libc.vdprintf, fd, b"x", bytes(32)), (getattr(libc, "__vdprintf_chk"), fd, 1, b"x", bytes(32)),
    ]:
        ctypes.set_errno(0)
        assert call(*arguments) == -1 and ctypes.get_errno() == errno.EOPNOTSUPP, call.__name__
    server.sendall(b"still")
    expect(client, b"still")
    client.sendall(b"back")
    assert server.recv(100) == b"back"
    # An alert of OpenSSL, sent as a record of another type.
    wait = beside(client.unwrap)
    server.unwrap()
    wait()


def copies():
    server, client = pair()
    fd = server.fileno()
    others = [os.dup(fd), os.dup2(fd, os.open("/dev/null", os.O_RDONLY)), fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 200)]
    for other in others:
        os.write(other, b"copy")
    server.detach()
    os.close(fd)
    # The number is now a plain socket's.
    left, right = socket.socketpair()
    assert fd in (left.fileno(), right.fileno())
    os.write(left.fileno(), b"plain")
    assert right.recv(100) == b"plain"
    for other in others:
        os.write(other, b"rest")
    expect(client, b"copy" * 3 + b"rest" * 3)
    # A copy becomes something else.
    os.dup2(left.fileno(), others[0])
    os.write(others[0], b"plain")
    assert right.recv(100) == b"plain"
    # Closed where the library does not see it.
    number = others[1]
    system_call = {"x86_64": 292, "aarch64": 24}[os.uname().machine]  # dup3
    assert libc.syscall(system_call, left.fileno(), number, 0) == number
    os.write(number, b"plain")
    assert right.recv(100) == b"plain"
    os.write(others[2], b"end")
    os.closerange(others[2], others[2] + 1)
    expect(client, b"end")
    server, client = pair()
    assert libc.dup3(server.fileno(), 210, os.O_CLOEXEC) == 210
    os.write(210, b"copy")
    if hasattr(libc, "closefrom"):
        libc.closefrom(205)
        os.dup2(left.fileno(), 210)
        os.write(210, b"plain")
        assert right.recv(100) == b"plain"
        os.close(210)
    server.sendall(b"end")
    expect(client, b"copyend")


def children():
    server, client = pair()
    child = os.fork()
    if child == 0:
        signal.alarm(PATIENCE)
        try:
            fails(errno.EIO, os.write, server.fileno(), b"x")
            copy = os.dup(server.fileno())
            fails(errno.EIO, os.write, copy, b"x")
            # A connection of the child's own.
            own, peer = pair()
            os.write(own.fileno(), b"own")
            expect(peer, b"own")
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    os.write(server.fileno(), b"parent")
    # Closes all descriptors in a child that shares the memory of this process.
    subprocess.run(["/bin/true"], check=True, close_fds=True)
    os.write(server.fileno(), b" after a command")
    expect(client, b"parent after a command")


def other_tables():
    """Descriptors of another thread, of children without handlers of fork, and copies from before the handshake."""
    server, client = pair()
    fd = server.fileno()

    def unshares():
        assert libc.close_range(fd, fd, 2) == 0, ctypes.get_errno()  # CLOSE_RANGE_UNSHARE
        fails(errno.EBADF, os.write, fd, b"x")

    beside(unshares)()
    os.write(fd, b"still sealed")
    expect(client, b"still sealed")
    buffer = ctypes.create_string_buffer(b"plain")
    child = libc._Fork()
    if child == 0:
        copies = [libc.dup(fd), libc.dup2(fd, 150), libc.fcntl(fd, fcntl.F_DUPFD, 200)]
        sent = [libc.write(copy, buffer, 5) for copy in copies]
        os._exit(7 if sent == [-1] * 3 and ctypes.get_errno() == errno.EIO else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    os.write(fd, b"parent")
    expect(client, b"parent")
    before = []
    server, client = pair(prepare=lambda end: before.extend([os.dup(end.fileno()), os.dup2(end.fileno(), 160)]))
    for copy in before:
        os.write(copy, b"copy")
        os.close(copy)
    server.sendall(b"end")
    expect(client, b"copycopyend")


def signals():
    """A handler with SA_RESTART runs while a call waits for room."""
    server, client = pair(send_buffer=4096)
    ran = []
    signal.signal(signal.SIGUSR1, lambda *_: ran.append(1))
    signal.siginterrupt(signal.SIGUSR1, False)
    main = threading.get_ident()
    stop = threading.Event()

    def disturb():
        while not stop.wait(0.002):
            signal.pthread_kill(main, signal.SIGUSR1)

    def read():
        got = bytearray()
        while len(got) < len(content):
            now = client.recv(1 << 14)
            assert now
            got += now
            time.sleep(0.0005)
        assert bytes(got) == content

    waits = [beside(disturb), beside(read)]
    at, source = 0, (ctypes.c_char * len(content)).from_buffer_copy(content)
    try:
        while at < len(content):
            sent = libc.write(server.fileno(), ctypes.byref(source, at), len(content) - at)
            assert sent > 0, errno.errorcode[ctypes.get_errno()]
            at += sent
    finally:
        stop.set()
    for wait in waits:
        wait()
    assert ran


def threads():
    server, client = pair()
    blocks, size = 200, 20011

    def work(letter):
        for _ in range(blocks):
            assert os.write(server.fileno(), letter * size) == size

    waits = [beside(work, letter) for letter in (b"a", b"b", b"c", b"d")]
    got = bytearray()
    while len(got) < 4 * blocks * size:
        now = client.recv(1 << 20)
        assert now
        got += now
    for wait in waits:
        wait()
    for at in range(0, len(got), size):
        assert got[at : at + size] == got[at : at + 1] * size, "calls are mixed"


def slow_reader():
    """A small buffer, so that most records are sent in parts."""
    server, client = pair(send_buffer=4096)
    server.setblocking(False)
    fd = server.fileno()
    # More than all buffers between the ends take.
    part = content * 4
    source = os.open(file_name, os.O_RDONLY)
    poll = select.epoll()
    poll.register(fd, select.EPOLLOUT | select.EPOLLET)
    ways = (lambda at: os.write(fd, part[at : at + 500_000]), lambda at: os.sendfile(fd, source, at % len(content), 500_000))
    for send in ways:
        at, wait = 0, None
        while at < len(part):
            try:
                at += send(at)
            except BlockingIOError:
                # The client does not read before the socket is full.
                wait = wait or beside(expect, client, part)
                assert poll.poll(PATIENCE), "no room is reported"
        assert wait, "the socket has not been full"
        wait()


def waits_for_more():
    """Short data of a loop of events goes with what follows, or before the loop waits."""
    (server, client), (other, other_client) = pair(), pair()
    poll = select.epoll()
    for end in (server, other):
        end.setblocking(False)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    poll.poll(0)

    def unsent(end):
        return struct.unpack("i", fcntl.ioctl(end.fileno(), 0x894B, b"0000"))[0]  # SIOCOUTQNSD

    def rounds(let_go):
        """Of a number of rounds, those in which the data waited, and those in which it had then gone. The kernel lets it go after 0.2 s."""
        waited = gone = 0
        for _ in range(50):
            assert os.write(server.fileno(), b"short") == 5
            before = unsent(server)
            let_go()
            waited += before > 0
            gone += before > 0 and unsent(server) == 0
            expect(client, b"short")
        return waited, gone

    zero = bytes(16)
    ways = [lambda: poll.poll(0), lambda: select.select([], [], [], 0), lambda: select.poll().poll(0), lambda: os.write(other.fileno(), b"x")]
    # Programs that are compiled with _FORTIFY_SOURCE call these.
    ways += [lambda: getattr(libc, "__poll_chk")(zero, 0, 0, 16), lambda: getattr(libc, "__ppoll_chk")(zero, 0, zero, None, 16)]
    for let_go in ways:
        waited, gone = rounds(let_go)
        assert waited > 0 and gone > 0, (waited, gone)
        poll.poll(0)
    expect(other_client, b"x" * 50)
    # With what follows.
    with open(file_name, "rb") as source:
        for _ in range(20):
            os.write(server.fileno(), b"head")
            assert os.sendfile(server.fileno(), source.fileno(), 0, 4096) == 4096
            expect(client, b"head" + content[:4096])
        os.write(server.fileno(), b"head")
        assert os.sendfile(server.fileno(), source.fileno(), len(content), 10) == 0
        poll.poll(0)
        expect(client, b"head")
    # A program that holds back itself is not disturbed.
    os.write(server.fileno(), b"short")
    server.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
    poll.poll(0)
    assert server.getsockopt(socket.IPPROTO_TCP, socket.TCP_CORK) == 1
    expect(client, b"short")
    waited = 0
    for _ in range(50):
        os.write(server.fileno(), b"corked")
        poll.poll(0)
        waited += unsent(server) > 0
    assert waited > 0
    server.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 0)
    expect(client, b"corked" * 50)
    os.write(server.fileno(), b"end")
    server.close()
    expect(client, b"end")


children()
every_call()
copies()
other_tables()
waits_for_more()
threads()
signals()
slow_reader()
print("ok")
