"""Clients of a server with TLS: `tls_get.py PORT FOLDER LARGE SMALL VERSION CIPHER`. Whole files, parts of them and heads on connections that stay
open, many connections at once, one that reads slowly with little room, and some that leave in the middle. Every byte is compared."""

import http.client
import signal
import socket
import ssl
import sys
import threading
import time

PATIENCE = 60
signal.alarm(2 * PATIENCE)
port, folder, large, small, version, cipher = sys.argv[1:]
files = {name: open(f"{folder}/{name}", "rb").read() for name in (large, small)}
context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
context.minimum_version = context.maximum_version = getattr(ssl.TLSVersion, version)
if version == "TLSv1_2":
    context.set_ciphers(cipher)


def connect(room=0):
    plain = socket.socket()
    plain.settimeout(PATIENCE)
    if room:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
    plain.connect(("127.0.0.1", int(port)))
    made = context.wrap_socket(plain)
    assert made.cipher()[0] == cipher, made.cipher()
    connection = http.client.HTTPConnection("127.0.0.1")
    connection.sock = made
    return connection


def ask(connection, name, method="GET", part=None):
    start, end = part or (0, len(files[name]))
    connection.request(method, f"/{name}", headers={"Range": f"bytes={start}-{end - 1}"} if part else {})
    answer = connection.getresponse()
    assert answer.status == (206 if part else 200), answer.status
    assert int(answer.headers["Content-Length"]) == end - start
    body = answer.read()
    assert body == (b"" if method == "HEAD" else files[name][start:end]), (name, method, part)


def one_connection():
    connection = connect()
    for name, method, part in [
        (small, "GET", None), (large, "GET", None), (large, "HEAD", None), (large, "GET", (5, 70005)), (small, "GET", (1, 2)),
        (large, "GET", (len(files[large]) - 1, len(files[large]))), (large, "GET", None), (small, "GET", None),
    ]:
        ask(connection, name, method, part)
    connection.sock.unwrap().close()


def slow_connection():
    connection = connect(room=4096)
    connection.request("GET", f"/{large}")
    answer = connection.getresponse()
    got = bytearray()
    while len(got) < 300_000:
        got += answer.read(20_000)
        time.sleep(0.001)
    assert got + answer.read() == files[large]


def leaving_connection(amount):
    connection = connect()
    connection.request("GET", f"/{large}")
    connection.getresponse().read(amount)
    connection.sock.close()


failed = []


def run(work, *arguments):
    try:
        work(*arguments)
    except BaseException as error:
        failed.append(error)


threads = [threading.Thread(target=run, args=arguments) for arguments in
           [(one_connection,)] * 8 + [(slow_connection,)] * 2 + [(leaving_connection, amount) for amount in (1, 100_000, 1_000_000)]]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
if failed:
    raise failed[0]
one_connection()
print("ok")
