"""Sends a file in the ways of os.sendfile, with other writes in between: `order.py PORT FILE`. programs.rs knows the bytes that come out."""

import os
import socket
import sys

CORK_OFF, CORK_ON = 0, 1


def send_range(descriptor, file, offset, count):
    end = offset + count
    while offset < end:
        sent = os.sendfile(descriptor, file, offset, end - offset)
        assert sent > 0, sent
        offset += sent


def main():
    port, path = int(sys.argv[1]), sys.argv[2]
    file = os.open(path, os.O_RDONLY)
    size = os.fstat(file).st_size
    connection = socket.create_connection(("127.0.0.1", port))
    connection.settimeout(None)
    number = connection.fileno()

    connection.sendall(b"more", socket.MSG_MORE)
    send_range(number, file, 0, size)
    connection.sendall(b"between")
    # A small one passes through.
    send_range(number, file, 11, 1000)

    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, CORK_ON)
    connection.sendall(b"corked")
    send_range(number, file, 7, 1_000_000)
    connection.sendall(b"still corked")
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, CORK_OFF)

    other = os.dup(number)
    send_range(other, file, 100, 500_000)
    connection.sendall(b"first of two numbers")
    os.close(other)
    send_range(number, file, 200, 400_000)

    child = os.fork()
    if child == 0:
        send_range(number, file, 5, 300_000)
        os.write(number, b"child")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    connection.sendall(b"parent")

    # Without an offset the position of the file moves.
    os.lseek(file, 1000, os.SEEK_SET)
    sent = 0
    while (now := os.sendfile(number, file, None, 1 << 30)) > 0:
        sent += now
    assert (sent, os.lseek(file, 0, os.SEEK_CUR)) == (size - 1000, size)
    # The end of the stream comes after the bytes.
    connection.close()


main()
