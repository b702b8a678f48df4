"""A server of files as http.server's, which sends bodies with os.sendfile: `serve.py PORT FOLDER`."""

import http.server
import os
import sys


class Handler(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def copyfile(self, source, outputfile):
        self.wfile.flush()
        # In a blocking call of the socket's number, whichever thread it is.
        offset, size = 0, os.fstat(source.fileno()).st_size
        while offset < size:
            sent = os.sendfile(self.connection.fileno(), source.fileno(), offset, size - offset)
            if sent == 0:
                break
            offset += sent

    def log_message(self, *_):
        pass


os.chdir(sys.argv[2])
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
