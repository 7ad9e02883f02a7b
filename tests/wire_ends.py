"""Both ends of the wire on this machine: keys and certificates of a small consortium, and messages there and back."""

import http.client
import secrets
import socket
import ssl
import time
from base64 import b64encode
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta

from polysite.deploy.certificates import SIGNATURE_OF_REQUEST, issue, public_pem
from polysite.deploy.flower.client import Fleet
from polysite.deploy.flower.messages import INSTANCE, KEY, PREFIX, SIGNATURE, TIME
from polysite.deploy.flower.server import Link

HEADER = {"round": -(2**63), "wås": "tråin\0", "rate": 0.5, "last": False, "labels": ["a", "b"], "none": []}
LARGE = (4 << 20) + 7  # bytes of a body that comes in many pieces


class Consortium:
    """A folder of keys and certificates: one CA, the coordinator, sites; and a CA that the sites do not know."""

    def __init__(self, folder):
        self.folder, self.keys = folder, {}
        for ca, servers, sites in (
            ("ca", ("server",), ("north", "south", "unregistered")),
            ("other", ("forged",), ("impostor",)),
        ):
            authority = self.keep(ca, issue(ca, None, 100))
            for name in (*servers, *sites):
                self.keep(name, issue(name, authority, 100, "127.0.0.1" if name in servers else ""))
        self.sites = {name: public_pem(self.keys[name].public_key()) for name in ("north", "south")}

    def keep(self, name, made):
        (self.folder / f"{name}.crt").write_bytes(made.pem)
        (self.folder / f"{name}.key").write_bytes(made.key_pem)
        self.keys[name] = made.key
        return made

    def files(self, name):
        paths = self.folder / f"{name}.crt", self.folder / f"{name}.key", self.folder / "ca.crt"
        return dict(zip(("certificate", "key", "ca"), paths, strict=True))

    def link(self, port=0, **others):
        return Link("127.0.0.1", port, **self.files("server"), sites=self.sites, **others)

    def fleet(self, link, name, **others):
        return Fleet(f"127.0.0.1:{link.port}", **(self.files(name) | others))

    def context(self, name=None):
        context = ssl.create_default_context(cafile=self.folder / "ca.crt")
        if name:
            context.load_cert_chain(self.folder / f"{name}.crt", self.folder / f"{name}.key")
        return context

    def signed(self, name, instance="i" * 32, behind=0):
        """The headers of a request, signed where the clock is so many seconds behind."""
        moment = (datetime.now(UTC) - timedelta(seconds=behind)).isoformat()
        return {
            KEY: b64encode(public_pem(self.keys[name].public_key())).decode(),
            SIGNATURE: b64encode(self.keys[name].sign(moment.encode(), SIGNATURE_OF_REQUEST)).decode(),
            TIME: moment,
            INSTANCE: instance,
        }

    def head(self, name, call, instance="i" * 32, method="POST", **more):
        """A signed request as bytes, up to its body."""
        headers = self.signed(name, instance) | {key.replace("_", "-"): value for key, value in more.items()}
        lines = [f"{method} {PREFIX}{call} HTTP/1.1", *(f"{key}: {value}" for key, value in headers.items()), "", ""]
        return "\r\n".join(lines).encode()

    def ask(self, link, name, path, headers, body=b"", method="POST"):
        """The status and the body of the response to any request."""
        connection = http.client.HTTPSConnection("127.0.0.1", link.port, context=self.context(name), timeout=20)
        with closing(connection):
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def post(self, link, name, call, headers, body=b""):
        return self.ask(link, name, PREFIX + call, headers, body)

    @contextmanager
    def dialled(self, link, name=None, tls=True):
        with socket.create_connection(("127.0.0.1", link.port), timeout=20) as plain:
            if tls:
                with self.context(name).wrap_socket(plain, server_hostname="127.0.0.1") as secure:
                    yield secure
            else:
                yield plain


def hung_up(connection):
    """The other side says what it has to say and closes."""
    said = b""
    try:
        while data := connection.recv(4096):
            said += data
    except OSError:
        pass
    return said


def until(look):
    """What is found by looking again and again, for a minute at most."""
    end = time.monotonic() + 60
    while not (found := look()):
        assert time.monotonic() < end, "nothing came within a minute"
        time.sleep(0.01)
    return found


def collected(link, *ids):
    """All answers."""
    found = []

    def look():
        found.extend(link.collect(ids))
        return len(found) == len(ids)

    until(look)
    return found


def received(fleet):
    return until(fleet.receive)


def send(link, site, header, body, ttl, group):
    return link.send_all({site: (header, body)}, ttl, group)[site]


def exchange(link, fleet, size=LARGE):
    """There and back, bit for bit."""
    body = secrets.token_bytes(size)
    sent = send(link, "north", HEADER, body, 60, "1")
    asked = received(fleet)
    assert (asked.header, asked.body) == (HEADER, body)
    assert {k: type(v) for k, v in asked.header.items()} == {k: type(v) for k, v in HEADER.items()}
    assert fleet.answer(asked, {"ok": True}, body[::-1])
    (answer,) = collected(link, sent)
    assert (answer.id, answer.error) == (sent, "")
    assert (answer.header, answer.body) == ({"ok": True}, body[::-1])


def empty(link):
    return not link._gateway.sent
