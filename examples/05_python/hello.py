"""The smallest service: python hello.py, then in a second shell: serval ask udp://127.0.0.1:9000 hello"""
import serval

with serval.serve(lambda messages: [m.upper() for m in messages], listen="udp://127.0.0.1:9000") as server:
    server.wait()
