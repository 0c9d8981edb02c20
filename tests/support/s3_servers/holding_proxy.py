"""A TCP proxy before a server that stands still when a stated number of bytes has passed.

So a test meets a transfer in its middle however fast the machine is: it waits for `held`, does what
it is there to do, and lets traffic go on. S3 signatures cover the host that the client addressed,
which is the proxy; servers take what the request says.
"""

import contextlib
import socket
import threading
import urllib.parse

PIECE_BYTES = 64 << 10


class HoldingProxy:
    """Forwards 127.0.0.1:port to a server. A context manager; `url` is what clients are told."""

    def __init__(self, server_url):
        parts = urllib.parse.urlsplit(server_url)
        self._server = (parts.hostname, parts.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._sockets = []
        self._left = {"sent": None, "received": None}  # bytes before the hold; None: no hold
        self._go_on = threading.Event()
        self._go_on.set()
        self.held = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.release()
        with self._lock:
            for one in [self._listener, *self._sockets]:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
                one.close()

    def hold_after(self, sent=None, received=None):
        """Stops all traffic once clients have sent, or received, so many bytes more."""
        with self._lock:
            self.held.clear()
            self._left = {"sent": sent, "received": received}

    def release(self):
        with self._lock:
            self._left = {"sent": None, "received": None}
            self._go_on.set()

    def _count(self, direction, size):
        with self._lock:
            if self._left[direction] is not None:
                self._left[direction] -= size
                if self._left[direction] <= 0:
                    self._go_on.clear()
                    self.held.set()
        self._go_on.wait()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                server = socket.create_connection(self._server)
                with self._lock:
                    self._sockets += [client, server]
                for source, sink, direction in ((client, server, "sent"),
                                                (server, client, "received")):
                    threading.Thread(target=self._forward, args=(source, sink, direction),
                                     daemon=True).start()

    def _forward(self, source, sink, direction):
        with contextlib.suppress(OSError):
            while piece := source.recv(PIECE_BYTES):
                self._count(direction, len(piece))
                sink.sendall(piece)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
