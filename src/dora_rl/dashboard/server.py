"""The dashboard's web server: a few files and a few JSON documents, over the standard library.

Answers GET only and never touches the run. On loopback it needs no token, but it answers only to a
loopback name in `Host`, so that no web page elsewhere can read a run through the browser. On any
other address a token is required: in the first address as `?token=`, then as a cookie.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from urllib.parse import parse_qsl, urlsplit

import msgspec

from dora_rl.dashboard.watcher import Watcher, whole
from dora_rl.io.connection import is_loopback
from dora_rl.types import UserError

FILES = {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "draw.js": "text/javascript; charset=utf-8",
    "timeline.js": "text/javascript; charset=utf-8",
    "views.js": "text/javascript; charset=utf-8",
    "groups.js": "text/javascript; charset=utf-8",
    "runs.js": "text/javascript; charset=utf-8",
}
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
COOKIE = "dora_rl_token"
PUSH_S = 15.0  # a word at least this often, so that a broken connection is noticed
PUSH_MIN_S = 0.4


class Server(ThreadingHTTPServer):
    """Serves the runs side by side: `?run=N` chooses one, the first where it is not given. `token`
    empty: none is asked for."""

    daemon_threads = True

    def __init__(self, watchers: Sequence[Watcher], host: str, port: int, token: str = "") -> None:
        self.watchers = watchers
        self.loopback = is_loopback(host)
        self.token = token or ("" if self.loopback else secrets.token_urlsafe(24))
        if ":" in host:
            import socket

            self.address_family = socket.AF_INET6
        try:
            super().__init__((host.strip("[]"), port), Handler)
        except OSError as error:
            raise UserError(f"cannot listen on {host}:{port}: {error.strerror}") from None

    @property
    def url(self) -> str:
        host, port = str(self.server_address[0]), self.server_address[1]
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{port}/" + (f"?token={self.token}" if self.token else "")


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    server_version = "dora-rl"
    sys_version = ""

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a line per request would bury the address that the user needs."""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = dict(parse_qsl(url.query))
        try:
            if not self._host_is_ours():
                self._refuse(HTTPStatus.MISDIRECTED_REQUEST, "unknown host name")
            elif not self._may_read(query):
                self._refuse(HTTPStatus.UNAUTHORIZED, "open the address with ?token=... first")
            else:
                self._answer(url.path, query)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the page was closed

    def _host_is_ours(self) -> bool:
        """On loopback a foreign name is a page that had its own name pointed at us."""
        host = self.headers.get("Host", "")
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        return not self.server.loopback or is_loopback(name)

    def _may_read(self, query: dict[str, str]) -> bool:
        given, token = query.get("token", "") or self._cookie(), self.server.token
        return not token or hmac.compare_digest(given.encode(), token.encode())

    def _cookie(self) -> str:
        try:
            cookie = SimpleCookie(self.headers.get("Cookie", "")).get(COOKIE)
        except CookieError:
            return ""
        return cookie.value if cookie is not None else ""

    def _answer(self, path: str, query: dict[str, str]) -> None:
        name = path.removeprefix("/") or "index.html"
        if name in FILES:
            self._send(
                HTTPStatus.OK,
                FILES[name],
                resources.files("dora_rl.dashboard").joinpath(name).read_bytes(),
                with_cookie="token" in query,
            )
        elif name == "api/runs":
            runs = [watcher.headline() for watcher in self.server.watchers]
            self._send(HTTPStatus.OK, "application/json", msgspec.json.encode(runs))
        elif name.startswith("api/"):
            self._answer_of_run(name.removeprefix("api/"), query)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "no such page")

    def _answer_of_run(self, name: str, query: dict[str, str]) -> None:
        number = whole(query.pop("run", "0"))
        if number is None or not 0 <= number < len(self.server.watchers):
            self._refuse(HTTPStatus.NOT_FOUND, "no such run")
            return
        watcher = self.server.watchers[number]
        if name == "live":
            self._push(watcher)
        elif (text := watcher.document(name, query)) is None:
            self._refuse(HTTPStatus.NOT_FOUND, "no such document")
        else:
            self._send(HTTPStatus.OK, "application/json", text.encode())

    def _push(self, watcher: Watcher) -> None:
        """Server-sent events: the revision, whenever it has moved."""
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self._send_headers()
        self.close_connection = True
        known = -1
        while True:
            known = watcher.wait(known, PUSH_S)
            self.wfile.write(f"data: {known}\n\n".encode())
            self.wfile.flush()
            watcher.pause(PUSH_MIN_S)

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        self._send(status, "application/json", msgspec.json.encode({"error": message}))

    def _send(
        self, status: HTTPStatus, kind: str, body: bytes, *, with_cookie: bool = False
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if with_cookie and self.server.token:
            self.send_header(
                "Set-Cookie", f"{COOKIE}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
            )
        self._send_headers()
        self.wfile.write(body)

    def _send_headers(self) -> None:
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
