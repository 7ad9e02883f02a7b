"""Slow links, cut links, proxies, and listeners that only pretend to be the coordinator."""

import secrets
import ssl
import threading
import zipfile
from base64 import b64encode
from contextlib import suppress
from dataclasses import replace

import pytest

from polysite.deploy import enrolment
from polysite.deploy import project as projects
from polysite.deploy.coordinator import run as coordinator
from polysite.deploy.flower import port
from polysite.deploy.flower.client import Fleet
from polysite.deploy.flower.connection import Lost, Refused
from polysite.deploy.flower.port import Pace
from polysite.deploy.project import SiteConfig
from polysite.deploy.proxy import Proxy
from polysite.deploy.site import courier, worker_process
from slow_link import SlowLink
from wire_ends import HEADER, collected, empty, exchange, received, send, until

SLOW, DELAY = 256e3 / 8, 0.3  # 256 kbit/s, 300 ms
CLOSED = 1  # a port without a listener
SIZE = 80 << 10  # bytes of a small model: two and a half seconds each way


@pytest.fixture
def link(consortium, monkeypatch):
    monkeypatch.setattr(port, "CONFIRM", 0.3)
    with consortium.link(pace=Pace(silence=3.0, window=60, rate=1000)) as link:
        yield link


def test_a_model_goes_over_a_link_of_256_kbit_with_300_ms_there_and_back(consortium, link, monkeypatch):
    """Timeouts are three seconds, and each way takes longer: what counts is that bytes move. Heartbeats are stuck
    behind an upload that takes longer than the coordinator waits for them: moving bytes are taken for them."""
    monkeypatch.setattr("flwr.server.superlink.linkstate.in_memory_linkstate.HEARTBEAT_PATIENCE", 0.3)  # 3 s
    size, there, over = 128 << 10, [], threading.Event()
    body = secrets.token_bytes(size)
    with SlowLink(link.port, SLOW, DELAY) as slow, consortium.fleet(slow, "north", timeout=3.0) as north:
        north._beat_on = lambda: None
        north.connect()

        def look():
            while not over.wait(0.1):
                there.append("north" in link.online())

        looking = threading.Thread(target=look)
        sent = send(link, "north", HEADER, body, 60, "1")
        asked = received(north)
        assert north._beat()  # the last one for now
        looking.start()
        assert north.answer(asked, {}, body)
        over.set()
        looking.join()
        assert len(there) > 5 and all(there)
        assert asked.body == body and collected(link, sent)[0].body == body
        assert slow.connections <= 4  # one a thread: none was given up
        assert size < slow.carried["up"] < 1.3 * size and size < slow.carried["down"] < 1.3 * size
    assert link.incidents() == [] and empty(link)


@pytest.mark.parametrize("lost", [False, True], ids=["soon mended", "mended after the site gave up"])
@pytest.mark.parametrize("way", ["up", "down"])
def test_what_was_cut_goes_on_where_it_was(consortium, link, way, lost):
    large, small = secrets.token_bytes(8 * SIZE), b"abc"
    with SlowLink(link.port, 20 * SLOW) as slow, consortium.fleet(slow, "north", patience=0.5) as north:
        north.connect()
        token = link.online()
        sent = send(link, "north", HEADER, small if way == "up" else large, 60, "1")
        asked = received(north) if way == "up" else None

        def carried(patience):
            if way == "up":
                return north.answer(asked, {"ok": 1}, large, patience=patience)
            return received(north).body == large

        before = slow.carried[way]
        for count in (2, 5):  # again and again; at last perhaps for long
            slow.cut_after(count * SIZE, way, CLOSED if lost and count == 5 else None)
        if lost:
            with pytest.raises(Lost):
                carried(patience=0.2)
            slow.far = link.port
            north.connect()
        assert carried(patience=120)
        assert link.online() == token  # for the study it was never away
        assert slow.carried[way] - before < 9.5 * SIZE  # the five that had arrived were not sent again
        if way == "up":
            (answer,) = collected(link, sent)
            assert (answer.header, answer.body == large, answer.error) == ({"ok": 1}, True, "")
        link.forget([sent])
    assert empty(link)


def test_a_response_after_which_the_connection_ends_is_read_to_its_end(consortium, link, monkeypatch):
    """As behind a proxy that opens TLS and keeps no connections."""
    respond = port.Request.respond

    def last(request, reply):
        request.connection = Ending(request.connection)
        respond(request, reply)
        request.connection = request.connection.real

    class Ending:
        def __init__(self, real):
            self.real, self.settimeout = real, real.settimeout

        def sendall(self, data):
            self.real.sendall(bytes(data).replace(b"\r\ncontent-length", b"\r\nconnection: close\r\ncontent-length", 1))

    monkeypatch.setattr(port.Request, "respond", last)
    with consortium.fleet(link, "north") as north:
        north.connect()
        exchange(link, north)


# proxies


def login(text):
    return f"Basic {b64encode(text.encode()).decode()}"


@pytest.mark.parametrize("wanted, given", [("", ""), ("north:right", "north:right"), ("north:right", "north:wrong")])
def test_a_site_connects_through_a_proxy_that_is_named_where_it_wants_another_login(consortium, link, wanted, given):
    with SlowLink(link.port, login=wanted and login(wanted)) as proxy:
        way = Proxy("127.0.0.1", proxy.port, given)
        with consortium.fleet(link, "north", proxy=way) as north:
            if wanted == given:
                north.connect()
                exchange(link, north, size=1000)
                assert set(proxy.asked) == {f"CONNECT 127.0.0.1:{link.port} HTTP/1.0"}
            else:
                with pytest.raises(Refused, match="wants a login") as said:
                    north.connect()
                assert "wrong" not in str(said.value) + repr(way) and not said.value.slowly


def foreign_tls(consortium):
    """A listener's TLS context with a certificate that another authority signed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(consortium.folder / "forged.crt", consortium.folder / "forged.key")
    return context


def test_a_proxy_that_opens_tls_is_refused(consortium, link):
    ends = foreign_tls(consortium), consortium.context("north")
    with (
        SlowLink(link.port, tls=ends) as opened,
        SlowLink(opened.port, login="") as proxy,
        consortium.fleet(link, "north", proxy=Proxy("127.0.0.1", proxy.port)) as north,
    ):
        with pytest.raises(Refused, match=r"not this consortium's coordinator.*proxy") as said:
            north.connect()
        assert said.value.slowly


# impostors


def test_pauses_between_attempts_to_connect_grow_and_the_same_sentence_is_said_once(monkeypatch):
    said, pauses = [], []

    class Forged:
        def connect(self):
            if len(pauses) < 12:
                raise Refused("is not the coordinator", slowly=True)

    monkeypatch.setattr(courier.time, "sleep", pauses.append)
    courier._connect(Forged(), said.append)
    assert len(said) == 1 and "trying again" in said[0]
    assert pauses == sorted(pauses) and pauses[0] < 1 and pauses[-1] == 60.0


def test_a_courier_outlives_a_forged_coordinator(consortium, tmp_path, monkeypatch):
    """All of ``polysite site run`` but its worker: an impostor at the address, then the real coordinator."""
    said, stopped, over = [], threading.Event(), threading.Event()

    class Resident:
        words, incidents = "no cases", []

        def __init__(self, site, say):
            self.line, self.tell = (lambda: None), say

        def stop(self):
            stopped.set()

    class Ending(Fleet):
        patience = property(lambda self: 0.5, lambda self, given: None)

        def connect(self):
            if over.is_set():
                raise SystemExit  # the order of the hospital
            super().connect()

    monkeypatch.setattr(courier, "Fleet", Ending)
    monkeypatch.setattr(worker_process, "WorkerProcess", Resident)
    monkeypatch.setattr(courier, "MAX_PAUSE", {False: 0.1, True: 0.1})
    project = projects.init(tmp_path / "p", ["north"], "localhost:9443")
    with zipfile.ZipFile(project.archive("north")) as archive:
        archive.extractall(tmp_path / "n")
    with SlowLink(CLOSED, tls=(foreign_tls(consortium), None)) as forged, SlowLink(forged.port) as way:
        site = replace(SiteConfig.load(tmp_path / "n"), server=f"localhost:{way.port}")

        def run():
            with suppress(SystemExit):
                courier.run(site, said.append)

        running = threading.Thread(target=run, daemon=True)
        running.start()
        until(lambda: any("is not this consortium's coordinator" in what for what in said))
        with coordinator.listening(replace(project, port=0)) as link:
            way.far = link.port
            until(lambda: "north" in link.online() and any("waiting to be asked" in what for what in said))
            way.far = forged.port
            way.cut()
            until(lambda: any("connection was lost" in what for what in said))
            way.far = link.port
            until(lambda: any("again" in what for what in said[-1:]))
            assert not stopped.is_set()
            assert sum("is not this consortium's coordinator" in what for what in said) <= 2  # once for each time
            enrolment.revoke(project.folder, "north")  # it goes on trying, and does nothing any more
            until(lambda: any("has revoked this site's key" in what for what in said))
        assert not stopped.is_set()
        over.set()
        running.join()
        assert stopped.is_set()
