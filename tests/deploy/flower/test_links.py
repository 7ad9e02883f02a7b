"""Slow links, cut links, proxies, and listeners that only pretend to be the coordinator."""

import secrets
import socket
import ssl
import threading
import zipfile
from base64 import b64encode
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

import pytest

from polysite.deploy import enrolment
from polysite.deploy import project as projects
from polysite.deploy.coordinator import run as coordinator
from polysite.deploy.flower import gateway, messages
from polysite.deploy.flower.client import Fleet
from polysite.deploy.flower.connection import Lost, Refused
from polysite.deploy.flower.gateway import Pace
from polysite.deploy.project import SiteConfig
from polysite.deploy.proxy import Proxy
from polysite.deploy.site import courier, worker_process
from slow_link import SlowLink
from wire_ends import HEADER, collected, empty, exchange, received, until

SLOW, DELAY = 256e3 / 8, 0.3  # 256 kbit/s, 300 ms
CLOSED = 1  # a port without a listener
SIZE = 80 << 10  # bytes of a small model: two and a half seconds each way


@pytest.fixture
def link(consortium, monkeypatch):
    monkeypatch.setattr(gateway, "CONFIRM", 0.3)
    with consortium.link(pace=Pace(silence=3.0, window=60, rate=1000)) as link:
        yield link


def test_a_model_goes_over_a_link_of_256_kbit_with_300_ms_there_and_back(consortium, link):
    """Timeouts are three seconds, and each way takes longer: what counts is that bytes move."""
    size = 128 << 10
    with SlowLink(link.port, SLOW, DELAY) as slow, consortium.fleet(slow, "north", timeout=3.0) as north:
        north.connect()
        exchange(link, north, size=size)
        assert slow.connections <= 4  # one a thread: none was given up
        assert size < slow.carried["up"] < 1.3 * size and size < slow.carried["down"] < 1.3 * size
    assert link.incidents() == [] and empty(link)


def test_a_site_is_there_as_long_as_its_bytes_move(consortium, link, monkeypatch):
    """Heartbeats are stuck behind an upload that takes longer than the coordinator waits for them."""
    monkeypatch.setattr("flwr.server.superlink.linkstate.in_memory_linkstate.HEARTBEAT_PATIENCE", 0.3)  # 3 s
    gone = []
    with SlowLink(link.port, SLOW, 0.05) as slow, consortium.fleet(slow, "north", timeout=3.0) as north:
        north._beat = lambda: True
        north.connect()
        sent = link.send("north", HEADER, b"abc", 60, "1")
        asked, over = received(north), threading.Event()

        def look():
            while not over.wait(0.1):
                gone.append("north" not in link.online())

        looking = threading.Thread(target=look)
        looking.start()
        assert north.answer(asked, {}, secrets.token_bytes(2 * SIZE))
        over.set()
        looking.join()
        assert len(collected(link, sent)) == 1
    assert len(gone) > 5 and not any(gone)


@pytest.mark.parametrize("lost", [False, True], ids=["soon mended", "mended after the site gave up"])
def test_an_upload_that_is_cut_goes_on_where_it_was(consortium, link, lost):
    with SlowLink(link.port, 20 * SLOW) as slow, consortium.fleet(slow, "north", patience=0.5) as north:
        north.connect()
        token, body = link.online(), secrets.token_bytes(8 * SIZE)
        sent = link.send("north", HEADER, b"abc", 60, "1")
        asked = received(north)
        before = slow.carried["up"]
        slow.cut_after(5 * SIZE, far=CLOSED if lost else None)
        if lost:
            with pytest.raises(Lost):
                north.answer(asked, {"ok": 1}, body, patience=0.2)
            slow.far = link.port
            north.connect()
        assert north.answer(asked, {"ok": 1}, body)
        (answer,) = collected(link, sent)
        assert (answer.header, answer.body == body, answer.error) == ({"ok": 1}, True, "")
        assert link.online() == token  # for the study it was never away
        assert slow.carried["up"] - before < 9.5 * SIZE  # the five that had arrived were not sent again
    assert empty(link)


@pytest.mark.parametrize("lost", [False, True], ids=["soon mended", "mended after the site gave up"])
def test_a_download_that_is_cut_goes_on_where_it_was(consortium, link, lost, monkeypatch):
    monkeypatch.setattr(messages, "CHUNK", SIZE if lost else messages.CHUNK)
    with SlowLink(link.port, 20 * SLOW) as slow, consortium.fleet(slow, "north", patience=0.1) as north:
        north.connect()
        token, body, before = link.online(), secrets.token_bytes(8 * SIZE), slow.carried["down"]
        sent = link.send("north", HEADER, body, 60, "1")
        slow.cut_after(5 * SIZE, "down", CLOSED if lost else None)
        if lost:
            with pytest.raises(Lost):
                received(north)
            slow.far = link.port
            north.connect()
        assert received(north).body == body and link.online() == token
        assert slow.carried["down"] - before < 9.5 * SIZE
        link.forget([sent])
    assert empty(link)


def test_a_request_whose_receipt_was_confirmed_into_a_cut_is_not_lost(consortium, link):
    """The coordinator takes it for received and would not send it again."""
    with consortium.fleet(link, "north", patience=0.1) as north:
        north.connect()
        confirm = north.client.ConfirmMessageReceived

        def cut(request):
            confirm(request)
            raise ConnectionResetError

        north.client.ConfirmMessageReceived = cut
        sent = link.send("north", HEADER, b"abc", 60, "1")
        with pytest.raises(Lost):
            received(north)
        north.client.ConfirmMessageReceived = confirm
        north.connect()
        asked = received(north)
        assert asked.body == b"abc" and north.answer(asked, {}, b"def")
        assert collected(link, sent)[0].body == b"def"
        assert north.receive() is None
    assert empty(link)


def test_a_request_that_was_given_up_cannot_write_any_more(consortium, link):
    """The site asks how much has arrived while its former request is still on the way: the new one counts."""
    with SlowLink(link.port, 20 * SLOW) as slow, consortium.fleet(slow, "north") as north:
        north.connect()
        sent, body = link.send("north", HEADER, b"abc", 60, "1"), secrets.token_bytes(8 * SIZE)
        asked, arrivals = received(north), []
        admitted = link._answers._receive_part

        async def watched(read, headers, size, site):
            arrival = link._answers.landings["north"].arrivals.get(headers[b"x-polysite-object"].decode())
            arrivals.append(arrival.arrived if arrival else 0)
            return await admitted(read, headers, size, site)

        link._answers._receive_part = watched
        slow.cut_after(4 * SIZE)
        assert north.answer(asked, {}, body)
        assert collected(link, sent)[0].body == body
        assert arrivals[0] == 0 and arrivals[-1] > 0  # the last request began where the first was cut


# proxies


def login(text):
    return f"Basic {b64encode(text.encode()).decode()}"


@pytest.mark.parametrize("wanted", ["", "north:geheim"])
def test_a_site_connects_through_a_proxy(consortium, link, wanted):
    with SlowLink(link.port, login=wanted and login(wanted)) as proxy:
        way = Proxy("127.0.0.1", proxy.port, wanted)
        with consortium.fleet(link, "north", proxy=way) as north:
            north.connect()
            exchange(link, north, size=1000)
            assert set(proxy.asked) == {f"CONNECT 127.0.0.1:{link.port} HTTP/1.0"}


def test_a_proxy_that_wants_another_login_is_named_and_the_login_is_not(consortium, link):
    with SlowLink(link.port, login=login("north:right")) as proxy:
        way = Proxy("127.0.0.1", proxy.port, "north:wrong")
        with consortium.fleet(link, "north", proxy=way) as north, pytest.raises(Refused, match="wants a login") as said:
            north.connect()
        assert "wrong" not in str(said.value) + repr(way) and not said.value.slowly


def foreign_tls(consortium, name):
    """A listener's TLS context with a certificate that another authority signed."""
    if not (consortium.folder / f"{name}.crt").exists():
        consortium.make(name, "other")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(consortium.folder / f"{name}.crt", consortium.folder / f"{name}.key")
    return context


def test_a_proxy_that_opens_tls_is_trusted_only_if_the_hospital_names_its_authority(consortium, link):
    ends = foreign_tls(consortium, "intercepting"), consortium.context("north")
    with SlowLink(link.port, tls=ends) as opened, SlowLink(opened.port, login="") as proxy:
        for ca, trusted in ((None, False), (consortium.folder / "other.crt", True)):
            with consortium.fleet(link, "north", proxy=Proxy("127.0.0.1", proxy.port, ca=ca)) as north:
                if trusted:
                    north.connect()
                    exchange(link, north, size=1000)
                else:
                    with pytest.raises(Refused, match=r"not this consortium's coordinator.*proxy") as said:
                        north.connect()
                    assert said.value.slowly
        assert opened.connections and set(proxy.asked) == {f"CONNECT 127.0.0.1:{link.port} HTTP/1.0"}


# impostors


@contextmanager
def impostor(consortium):
    """Accepts every connection at the coordinator's address, with a certificate of its own."""
    context = foreign_tls(consortium, "forged")
    listener = context.wrap_socket(socket.create_server(("127.0.0.1", 0)), server_side=True)

    def serve():
        with suppress(OSError):
            while True:
                with suppress(ssl.SSLError, ConnectionError):
                    listener.accept()[0].close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        thread.join()
        listener.close()


def test_a_forged_coordinator_is_refused_with_one_sentence_and_the_real_one_found_again(consortium, link, monkeypatch):
    said, pauses = [], []
    with impostor(consortium) as forged, SlowLink(forged) as way, consortium.fleet(way, "north") as north:

        def rest(seconds):
            pauses.append(seconds)
            if len(pauses) == 12:
                way.far = link.port  # the impostor has gone

        monkeypatch.setattr(courier.time, "sleep", rest)
        courier._connect(north, said.append)
        monkeypatch.undo()
        assert len(said) == 1 and "is not this consortium's coordinator" in said[0] and "trying again" in said[0]
        assert pauses == sorted(pauses) and pauses[0] < 1 and pauses[-1] == 60.0
        exchange(link, north, size=1000)


def test_a_courier_outlives_a_forged_coordinator(consortium, tmp_path, monkeypatch):
    """All of ``polysite site run`` but its worker: an impostor at the address, then the real coordinator."""
    said, stopped = [], threading.Event()

    class Resident:
        words, incidents = "no cases", []

        def __init__(self, site, say):
            self.line, self.tell = (lambda: None), say

        def stop(self):
            stopped.set()

    class Ending(Fleet):
        def connect(self):
            if over.is_set():
                raise SystemExit  # the order of the hospital
            super().connect()

    over = threading.Event()
    monkeypatch.setattr(courier, "Fleet", Ending)
    project = projects.init(tmp_path / "p", ["north"], "localhost:9443")
    with zipfile.ZipFile(project.archive("north")) as archive:
        archive.extractall(tmp_path / "n")
    monkeypatch.setattr(worker_process, "WorkerProcess", Resident)
    monkeypatch.setattr(courier, "MAX_PAUSE", {False: 0.1, True: 0.1})
    with impostor(consortium) as forged, SlowLink(forged) as way:
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
            way.far = forged
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


def test_a_forged_coordinator_in_the_middle_of_a_study_ends_nothing(consortium, link):
    with ExitStack() as stack:
        forged, way = stack.enter_context(impostor(consortium)), stack.enter_context(SlowLink(link.port))
        with consortium.fleet(way, "north", patience=0.2) as north:
            north.connect()
            sent = link.send("north", HEADER, b"abc", 60, "1")
            asked = received(north)
            way.far = forged
            way.cut()
            with pytest.raises(Lost):
                north.answer(asked, {}, b"x" * 1000, patience=0.2)
            with pytest.raises(Refused, match="not this consortium's coordinator"):
                north.connect()
            way.far = link.port
            north.connect()
            assert north.answer(asked, {}, b"x" * 1000)
            assert collected(link, sent)[0].body == b"x" * 1000
