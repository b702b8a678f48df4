"""Serves a function over UDP and TCP, asks it many messages, and checks every reply.

    python check.py [--messages N] [--arrays] [--json] [--corrupt]

Exit code 0: every reply was right. 1: replies were wrong or missing. --corrupt spoils one byte of one reply, to show that the check finds it.
"""

import argparse
import json
import random
import sys
import time

import serval


def reverse(messages):
    return [message[::-1] for message in messages]


def triple(batch):
    return batch * 3


class SpoilsOneByte:
    """The function with one byte of its first reply changed."""

    def __init__(self, function):
        self.function = function
        self.spoiled = False

    def __call__(self, batch):
        replies = self.function(batch)
        if not self.spoiled:
            self.spoiled = True
            if isinstance(replies, list):
                replies[0] = bytes([replies[0][0] ^ 1]) + replies[0][1:]
            else:
                replies.view("u1")[0, 0] ^= 1
        return replies


def check(server, messages, expected):
    """Asks every message over every port; returns how many replies were checked and how many were wrong."""
    checked = wrong = 0
    for url in server.urls:
        with serval.Client(url, timeout=10) as client:
            try:
                replies = client.ask_many(messages, in_flight=32)
            except serval.ReplyTimeout as error:
                replies = error.replies
        checked += len(replies)
        wrong += sum(reply != right for reply, right in zip(replies, expected))
    return checked, wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=2000)
    parser.add_argument("--arrays", action="store_true", help="serve NumPy arrays instead of bytes")
    parser.add_argument("--json", action="store_true", help="the last line is an object with the result")
    parser.add_argument("--corrupt", action="store_true", help="spoil one byte of one reply")
    options = parser.parse_args()
    listen = ["udp://127.0.0.1:0", "tcp://127.0.0.1:0"]
    numbers = random.Random(7)
    if options.arrays:
        import numpy

        messages = [numpy.float32([numbers.random() for _ in range(16)]).tobytes() for _ in range(options.messages)]
        expected = [(numpy.frombuffer(message, "f4") * numpy.float32(3)).tobytes() for message in messages]
        function = SpoilsOneByte(triple) if options.corrupt else triple
        serving = serval.serve(function, listen=listen, dtype="f4", shape=(16,), reply_shape=(16,))
    else:
        messages = [numbers.randbytes(numbers.randint(1, 500)) for _ in range(options.messages)]
        expected = [message[::-1] for message in messages]
        function = SpoilsOneByte(reverse) if options.corrupt else reverse
        serving = serval.serve(function, listen=listen)
    began = time.monotonic()
    with serving as server:
        checked, wrong = check(server, messages, expected)
        stats = server.stats()
    seconds = time.monotonic() - began
    print(f"{checked} replies checked, {wrong} wrong or missing; {stats['calls']} calls of the function in {seconds:.1f} s")
    if options.json:
        print(json.dumps({"checked": checked, "wrong": wrong, "calls": stats["calls"], "closed": stats["closed"]}))
    sys.exit(1 if wrong or not checked else 0)


if __name__ == "__main__":
    main()
