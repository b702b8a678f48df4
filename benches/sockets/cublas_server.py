#!/usr/bin/env python3
"""A host server for matrix products with cuBLAS: receive, copy to the GPU, launch, copy back, send. The wire format is that of
device/kernels/matmul.cpp. One connection is served at a time per thread; memory is pinned, and allocated once for each connection.

    cublas_server.py PORT          needs torch with CUDA; prints "ready"
"""

import socket, struct, sys, threading

import torch


def whole(s, view):
    while len(view):
        count = s.recv_into(view)
        if count == 0:
            return False
        view = view[count:]
    return True


def serve(s):
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream, sizes = torch.cuda.Stream(), {}
    head = bytearray(4)
    with torch.cuda.stream(stream):
        while whole(s, memoryview(head)):
            (n,) = struct.unpack("<I", head)
            if n not in sizes:
                near = torch.empty(3 * n * n, dtype=torch.float32).pin_memory()
                sizes[n] = near, memoryview(near.numpy()).cast("B"), torch.empty(3 * n * n, dtype=torch.float32, device="cuda")
            near, view, far = sizes[n]
            if not whole(s, view[: 8 * n * n]):
                break
            far[: 2 * n * n].copy_(near[: 2 * n * n], non_blocking=True)
            a, b, c = far.view(3, n, n)
            torch.mm(a, b, out=c)
            near[2 * n * n :].copy_(far[2 * n * n :], non_blocking=True)
            stream.synchronize()
            s.sendall(view[8 * n * n :])
    s.close()


def main():
    torch.mm(torch.ones(8, 8, device="cuda"), torch.ones(8, 8, device="cuda"))
    torch.cuda.synchronize()
    listener = socket.create_server(("127.0.0.1", int(sys.argv[1])), backlog=64)
    print("ready", flush=True)
    while True:
        threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()


main()
