#!/usr/bin/env python3
"""Asks the service `products` for a matrix product, and checks it: client.py [PORT [N]]

On the wire, little endian: the request is u32 n, then two matrices of n * n float32 by rows; the answer is their product."""

import array, random, socket, struct, sys


def ask(connection, n, a, b):
    """The product of two n by n matrices, which are arrays of floats by rows."""
    connection.sendall(struct.pack("<I", n) + a.tobytes() + b.tobytes())
    answer = bytearray(4 * n * n)
    view = memoryview(answer)
    while view:
        count = connection.recv_into(view)
        if count == 0:
            raise ConnectionError("the server has ended the connection")
        view = view[count:]
    return array.array("f", bytes(answer))


def main():
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 9008
    sizes = [int(sys.argv[2])] if len(sys.argv) > 2 else [32, 64, 96]
    with socket.create_connection(("127.0.0.1", port)) as connection:
        for n in sizes:
            # Small whole numbers, so that every sum is exact.
            a, b = (array.array("f", [random.randint(-4, 4) for _ in range(n * n)]) for _ in range(2))
            c = ask(connection, n, a, b)
            columns = [b[j::n] for j in range(n)]
            wrong = sum(c[i * n + j] != sum(x * y for x, y in zip(a[i * n : i * n + n], columns[j])) for i in range(n) for j in range(n))
            print(f"{n} x {n}: {n * n} numbers, {wrong} wrong")
            if wrong:
                sys.exit(1)


main()
