"""asyncio sends a file on several connections of one loop: `loop.py PORT FILE CONNECTIONS`. Its sockets do not block."""

import asyncio
import sys


async def send(port, path, number):
    loop = asyncio.get_running_loop()
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"%d:" % number)
    with open(path, "rb") as file:
        # Fails where the loop would have to copy the file itself.
        sent = await loop.sendfile(writer.transport, file, fallback=False)
        writer.write(b" then ")
        sent += await loop.sendfile(writer.transport, file, 1000, 2_000_000, fallback=False)
    writer.write(b" end")
    writer.close()
    await writer.wait_closed()
    return sent


async def main():
    port, path, connections = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    await asyncio.gather(*(send(port, path, number) for number in range(connections)))


asyncio.run(main())
