"""Serve the page of a run to this machine while the run goes on.

It is the page of ``polysite report``, rebuilt when the run folder has changed. The server listens on 127.0.0.1 and
refuses requests that are addressed to another host name (DNS rebinding).
"""

from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock

from polysite.engines.run_folder import RunFolder
from polysite.errors import PolysiteError, RunError
from polysite.report.page import Options, build
from polysite.report.runs import methods, read

HOSTS = ("127.0.0.1", "localhost")


class Live:
    """The page of a run folder, rebuilt when the folder changes."""

    def __init__(self, run: Path, options: Options = Options()):
        self.run, self.options, self.lock = run, options, Lock()
        self.seen, self.text = "", ""

    @property
    def state(self) -> str:
        """Sizes and times of the files that the page shows."""
        files = ("rounds.jsonl", "result.json", *(f"evaluation/{n}/about.json" for n in ("test", "validation")))
        stamps = [p.stat() for f in files if (p := self.run / f).exists()]
        return " ".join(f"{s.st_size}.{s.st_mtime_ns}" for s in stamps)

    def page(self) -> str:
        """Return the current page."""
        with self.lock:
            state = self.state
            if state != self.seen:
                shown = methods([read(self.run)])
                live = "" if shown[0].first.finished and shown[0].first.evaluation else state
                self.text = build(f"{shown[0].name}, live", shown, self.options, live=live)
                self.seen = state
            return self.text


def serve(
    run: Path, port: int = 8765, ready: Callable[[str], None] = lambda address: None, options: Options = Options()
) -> None:
    """Serve the page until interrupted; ``ready`` is called with the address."""
    RunFolder.open(run)
    live = Live(run, options)
    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), _handler(live))
    except (OSError, OverflowError) as problem:
        raise RunError(f"port {port} cannot be listened on: {problem}; choose another with --port, or 0") from problem
    with server:
        ready(f"http://127.0.0.1:{server.server_port}/")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return


def _handler(live: Live) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            if (self.headers.get("Host") or "").partition(":")[0] not in HOSTS:
                return self._answer(403, "this page is served to this machine only")
            if self.path == "/state":
                return self._answer(200, live.state)
            if self.path != "/":
                return self._answer(404, "the only page is /")
            try:
                return self._answer(200, live.page(), "text/html")
            except PolysiteError as problem:
                return self._answer(500, str(problem))

        def _answer(self, code: int, text: str, kind: str = "text/plain") -> None:
            body = text.encode()
            self.send_response(code)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    return Handler
