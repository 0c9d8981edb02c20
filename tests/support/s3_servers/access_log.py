"""What an S3 server was asked, by its own account: the access log of the Ceph gateway."""

import collections
import re
import time
import urllib.parse
import uuid

TIMEOUT_S = 30
POLL_INTERVAL_S = 0.01

Request = collections.namedtuple("Request", "method key query status body_bytes range_begin")

_LINE = re.compile(r'beast: \S+ \S+ - \S+ \[[^]]*\] '
                   r'"(\w+) /([^/ ?]*)/?([^ ?]*)(\?\S*)? HTTP/[\d.]+" '
                   r"(\d+) (\d+) .*? (?:bytes=(\d+)-\d*|-) latency")


class AccessLog:
    """Requests to one bucket since the object was made, or since `restart`."""

    def __init__(self, path, client):
        self._path, self._client = path, client
        self.restart()

    def restart(self):
        self._flush()
        with open(self._path, "rb") as log:
            self._start = log.seek(0, 2)

    def requests(self):
        """Every request that was answered before this call."""
        mark = self._flush()
        with open(self._path, "rb") as log:
            log.seek(self._start)
            lines = log.read().decode(errors="replace").splitlines()
        found = []
        for line in lines:
            match = _LINE.search(line)
            if match and match.group(2) == self._client.bucket:
                key = urllib.parse.unquote(match.group(3))
                found.append(Request(match.group(1), key, match.group(4) or "",
                                     int(match.group(5)), int(match.group(6)),
                                     int(match.group(7) or 0)))
        return [request for request in found if request.key != mark]

    def _flush(self):
        """The gateway writes its log behind its answers: asks something and waits for its line."""
        mark = f"mark-{uuid.uuid4()}"
        self._client.head(mark)
        end = time.monotonic() + TIMEOUT_S
        while time.monotonic() < end:
            with open(self._path, "rb") as log:
                if f"/{mark} ".encode() in log.read():
                    return mark
            time.sleep(POLL_INTERVAL_S)
        raise AssertionError(f"no line about {mark} in {self._path}")
