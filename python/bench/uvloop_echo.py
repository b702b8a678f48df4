"""The baseline: a UDP echo server on asyncio with uvloop. Arguments: address, port, `protocol` or `reader`.

`protocol` is the usual way, a DatagramProtocol. `reader` is the fastest one known: it reads the socket itself, many datagrams for each
time that the loop finds it readable.
"""

import asyncio
import socket
import sys

import uvloop

#: Datagrams for each time that the socket is readable.
BURST = 64


class Echo(asyncio.DatagramProtocol):
    def connection_made(self, transport):
        self.send = transport.sendto

    def datagram_received(self, data, source):
        self.send(data, source)


def read(opened):
    receive, send = opened.recvfrom, opened.sendto
    try:
        for _ in range(BURST):
            send(*receive(2048))
    except BlockingIOError:
        pass


async def main(address, port, way):
    opened = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    opened.setblocking(False)
    opened.bind((address, port))
    loop = asyncio.get_running_loop()
    if way == "reader":
        loop.add_reader(opened, read, opened)
    else:
        await loop.create_datagram_endpoint(Echo, sock=opened)
    print(f"udp://{address}:{opened.getsockname()[1]}", flush=True)
    await asyncio.Event().wait()


uvloop.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
