from io import BufferedReader

from .greenio import GreenSocket

class Input:
    rfile: BufferedReader
    content_length: int
    position: int
    chunked_input: bool
    def __init__(self, rfile: BufferedReader, content_length: int, sock: GreenSocket | None) -> None: ...
    def get_socket(self) -> GreenSocket: ...
    def read(self, length: int | None = None) -> bytes: ...
