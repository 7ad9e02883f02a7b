"""A page in a real browser: headless Chromium over its own pipe, without any package.

``--dump-dom`` would be simpler, but its virtual time does not wait for pictures that are still being decoded, and its
window is never narrower than 500 pixels. The pipe speaks the DevTools protocol: JSON, a zero byte after each message.
"""

import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Any, NamedTuple

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
PATIENCE = 60  # seconds, after which the browser is ended
SCRIPT = """(async () => {
  if (document.readyState !== "complete") await new Promise((done) => addEventListener("load", done));
  const result = await (async () => { %s })();
  await new Promise((done) => setTimeout(done, 100)); // for late errors
  return result;
})()"""

Ask = Callable[..., dict[str, Any]]
_running: list["Chromium"] = []


class Seen(NamedTuple):
    """What a script returned, and all that went wrong: exceptions, what the console says, requests to anywhere."""

    result: Any
    errors: list[str]


def browse(page: Path, script: str, width: int = 1280, media: str = "screen") -> Seen:
    """Load a page, run the body of an async function in it, return what that returns as JSON. Below 500 pixels of width
    the browser takes itself for a phone."""
    phone = width < 500
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1 + phone, "mobile": phone}
    with _page() as (ask, events):
        ask("Emulation.setDeviceMetricsOverride", **screen)
        ask("Emulation.setTouchEmulationEnabled", enabled=phone)
        ask("Emulation.setEmulatedMedia", media=media)
        for domain in ("Page", "Runtime", "Log", "Network"):
            ask(f"{domain}.enable")
        ask("Page.navigate", url=page.as_uri())
        answer = ask("Runtime.evaluate", expression=SCRIPT % script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"the script on {page} failed: {_words(answer['exceptionDetails'])}")
    return Seen(answer["result"].get("value"), [text for e in events if (text := _wrong(e, page))])


class Chromium:
    """A browser that stays for all pages of a session, and what it says."""

    def __init__(self) -> None:
        program = next((found for name in NAMES if (found := shutil.which(name))), None)
        if program is None:
            pytest.skip("chromium is not installed")
        (commands, sender), (receiver, answers) = os.pipe(), os.pipe()

        def wire() -> None:  # Chromium reads from 3 and writes to 4
            high = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (commands, answers)]
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        command, quiet = [program, *FLAGS, f"--user-data-dir={self.profile.name}"], subprocess.DEVNULL
        self.process = subprocess.Popen(command, stdout=quiet, stderr=quiet, close_fds=False, preexec_fn=wire)
        os.close(commands)
        os.close(answers)
        self.to, self.back = open(sender, "wb", buffering=0), open(receiver, "rb")  # noqa: PTH123, SIM115 (descriptors)
        self.sent, self.events = 0, []

    def close(self) -> None:
        """End it; nothing that it keeps is wanted."""
        self.process.kill()
        self.process.wait()
        self.to.close()
        self.back.close()
        self.profile.cleanup()

    @contextmanager
    def page(self) -> Iterator[Ask]:
        """A blank page that shares nothing with others: a function that sends a command and returns the answer."""
        self.events = []
        end = Timer(PATIENCE, self.process.kill)
        end.start()
        try:
            context = self.ask("Target.createBrowserContext")["browserContextId"]
            target = self.ask("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
            session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            yield lambda method, **given: self.ask(method, session, **given)
            self.ask("Target.disposeBrowserContext", browserContextId=context)
        finally:
            end.cancel()

    def ask(self, method: str, session: str | None = None, **given: Any) -> dict[str, Any]:
        self.sent += 1
        message = {"id": self.sent, "method": method, "params": given} | ({"sessionId": session} if session else {})
        self.to.write(json.dumps(message).encode() + b"\0")
        while text := b"".join(_until_zero(self.back)):
            reply = json.loads(text)
            if reply.get("id") != self.sent:
                self.events.append(reply)
            elif "error" in reply:
                raise RuntimeError(f"{method}: {reply['error']['message']}")
            else:
                return dict(reply["result"])
        raise RuntimeError(f"chromium ended, or took longer than {PATIENCE} seconds, in {method}")


@contextmanager
def _page() -> Iterator[tuple[Ask, list[dict[str, Any]]]]:
    """A page in the one browser, and its events; after anything unusual the next page is in another browser."""
    if not _running:
        _running.append(Chromium())
    try:
        with _running[0].page() as ask:
            yield ask, _running[0].events
    except BaseException:
        close()
        raise


def close() -> None:
    """End the browser, if there is one."""
    while _running:
        _running.pop().close()


def _until_zero(back: Any) -> Iterator[bytes]:
    while (byte := back.read(1)) and byte != b"\0":
        yield byte


def _wrong(event: dict[str, Any], page: Path) -> str:
    """What an event says that should not be, or nothing."""
    given = event.get("params", {})
    match event.get("method"):
        case "Runtime.exceptionThrown":
            return _words(given["exceptionDetails"])
        case "Runtime.consoleAPICalled":
            return " ".join(str(a.get("value", a.get("description", ""))) for a in given["args"])
        case "Log.entryAdded":
            return str(given["entry"]["text"])
        case "Network.requestWillBeSent":
            url = str(given["request"]["url"])
            return "" if url.startswith(("data:", "blob:", page.as_uri())) else f"request: {url[:200]}"
    return ""


def _words(details: dict[str, Any]) -> str:
    return str(details.get("exception", {}).get("description", details["text"]))
