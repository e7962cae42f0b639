"""Serves the page of runs that still go on, to browsers of this machine unless asked otherwise."""

import hmac
import secrets
import socket
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from moejax.errors import InputError
from moejax.html import embed
from moejax.report.goodput import EVENTS
from moejax.report.page import page_data, page_of
from moejax.report.runs import CONFIG, EXPERTS, METRICS, PLAN

LOOPBACK = ("127.0.0.1", "localhost", "::1")
READ = (METRICS, EXPERTS, CONFIG, PLAN)  # files that the page is made of, beside the logs


class Server(ThreadingHTTPServer):
    """Answers `/` with the page and `/data` with its data, to those who may ask.

    On the loopback address the request must name it as its host, so that no other site that a
    browser has open can read the page under a name of its own. On any other address it must carry
    the token.
    """

    daemon_threads = True

    def __init__(self, directories: list[Path], host: str, port: int):
        """Takes the address to listen on; port 0 takes a free one.

        Raises:
          InputError: if a directory holds no run, or the address cannot be used.
        """
        page_data(directories)  # a wrong directory is told before anything listens
        self.directories = directories
        self.token = "" if host in LOOPBACK else secrets.token_urlsafe(16)
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self.address_family = found[0]
            super().__init__((str(found[4][0]), port), Handler)
        except OSError as error:
            raise InputError(
                f"cannot listen. {host}:{port}: {error.strerror}. The address must be this "
                f"machine's, and the port free. Choose another with --port."
            ) from error

    @property
    def url(self) -> str:
        """The address to open, with the token where one is needed."""
        host, port = self.server_address[:2]
        host = f"[{host}]" if self.address_family == socket.AF_INET6 else host
        return f"http://{host}:{port}/" + (f"?token={self.token}" if self.token else "")

    def mark(self) -> str:
        """Returns a text that changes whenever a file behind the page changes."""
        stats = [path.stat() for one in self.directories for path in _files(one)]
        return ".".join(f"{stat.st_mtime_ns:x}-{stat.st_size:x}" for stat in stats)

    def data(self) -> dict:
        """Returns the page's data and its mark, which is older than the data at worst."""
        mark = self.mark()
        return page_data(self.directories, live=True) | {"mark": mark}


def _files(directory: Path) -> list[Path]:
    logs = sorted((directory / EVENTS).glob("*.jsonl"))
    return [*(path for name in READ if (path := directory / name).is_file()), *logs]


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    timeout = 60  # seconds for a request, so that who says nothing keeps no thread

    def do_GET(self) -> None:
        """Sends the page, its data, or an error."""
        asked = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(asked.query).items()}
        if not self._allowed(query.get("token", "")):
            self._send(
                403, "text/plain", "moejax report: open the address that the command printed.\n"
            )
        elif asked.path == "/":
            self._made("text/html", lambda: page_of(self.server.data()))
        elif asked.path == "/data" and query.get("mark") == self.server.mark():
            self._send(204, "application/json", "")
        elif asked.path == "/data":
            self._made("application/json", lambda: embed(self.server.data()))
        else:
            self._send(404, "text/plain", "moejax report: there is only /.\n")

    def _allowed(self, token: str) -> bool:
        if self.server.token:
            return hmac.compare_digest(token.encode(), self.server.token.encode())
        host = self.headers.get("Host", "").rpartition(":")[0].strip("[]")
        return host in LOOPBACK

    def _made(self, kind: str, make: Callable[[], str]) -> None:
        try:
            text = make()
        except InputError as error:  # the directory was removed meanwhile
            self._send(500, "text/plain", f"{error}\n")
        else:
            self._send(200, kind, text)

    def _send(self, status: int, kind: str, text: str) -> None:
        body = text.encode("utf-8")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing: the command's screen is for people."""
