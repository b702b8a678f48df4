"""A UDP echo server as a host call. Arguments: batch, max_delay_us."""

import json
import sys

import serval

batch, delay = int(sys.argv[1]), int(sys.argv[2])
with serval.serve(lambda messages: messages, listen="udp://127.0.0.1:0", batch=batch, max_delay_us=delay) as server:
    print(server.url, flush=True)
    sys.stdin.read()
    print(json.dumps(server.stats()), flush=True)
