"""Both ends of the wire on real sockets: what goes through, what is refused, and that neither harms the other."""

import datetime
import gc
import hashlib
import http.client
import json
import secrets
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, nullcontext, suppress

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from polysite import buffers
from polysite.deploy.flower import gateway
from polysite.deploy.flower.connection import Lost, Refused
from polysite.deploy.flower.gateway import CALLS, Pace
from polysite.deploy.flower.messages import CHUNK, Chunk, deflate, inflate, pack, read_content, unpack, wrap
from polysite.deploy.flower.objects import before_chunk, pulled, pushed, read_pushed
from polysite.deploy.flower.server import Link
from polysite.deploy.flower.wire import Slot, read_response
from polysite.errors import PayloadError, RunError
from wire_ends import HEADER, collected, empty, exchange, received, until

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, Metadata, MetricRecord, RecordDict  # isort: skip
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest, PushMessagesRequest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER
from flwr.supercore.date import now


@pytest.fixture
def link(consortium):
    with consortium.link() as link:
        yield link


@pytest.fixture
def north(consortium, link):
    with consortium.fleet(link, "north") as north:
        north.connect()
        yield north


@pytest.fixture(scope="module")
def study(consortium):
    """One that runs on while strangers come and go."""
    with consortium.link() as link, consortium.fleet(link, "north") as north:
        north.connect()
        yield link, north


# What goes through


def test_a_message_goes_there_and_back_and_leaves_nothing(link, north):
    assert north.receive() is None
    exchange(link, north, size=3 * CHUNK + 7)
    exchange(link, north, size=0)
    assert empty(link) and not link._sent and link.incidents() == []


def test_memory_of_messages_is_used_again_though_no_garbage_is_collected(link, north, monkeypatch):
    fresh = []
    monkeypatch.setattr(buffers, "_kept", [])
    monkeypatch.setattr(buffers, "_new", lambda size, new=buffers._new: fresh.append(size) or new(size))
    gc.disable()
    try:
        for _ in range(8):
            sent = link.send("north", HEADER, buffers.room(3 << 20), 60, "1")
            asked = received(north)
            assert north.answer(asked, {}, buffers.room(3 << 20))
            del asked
            assert len(collected(link, sent)) == 1
    finally:
        gc.enable()
    assert 0 < len(fresh) < 8  # an exchange needs four


def test_a_body_for_two_sites_is_hashed_and_kept_once(consortium, link, north, monkeypatch):
    wrapped = []
    monkeypatch.setattr("polysite.deploy.flower.server.wrap", lambda body: wrapped.append(body) or wrap(body))
    with consortium.fleet(link, "south") as south:
        south.connect()
        body = secrets.token_bytes(2 * CHUNK)
        sent = link.send_all({"north": ({"to": 1}, body), "south": ({"to": 2}, body)}, 60, "1")
        assert wrapped == [body]
        assert len(body) < sum(len(each.content) for each in link._store.store.values()) < len(body) + 10_000
        for site, fleet in (("north", north), ("south", south)):
            asked = received(fleet)
            assert asked.body == body
            assert fleet.answer(asked, {"from": site}, body)
    answers = collected(link, *sent.values())
    assert {a.id: (a.header["from"], a.body == body) for a in answers} == {i: (s, True) for s, i in sent.items()}
    assert empty(link)


def test_a_request_for_messages_is_held_until_there_is_one(link, north):
    asked = []
    waiting = threading.Thread(target=lambda: asked.append(north.receive(5)))
    waiting.start()
    until(lambda: "north" in link._guard._news)
    link.send("north", HEADER, b"body", 60, "1")
    waiting.join()
    assert asked[0] is not None and asked[0].body == b"body"


def test_what_is_forgotten_is_gone_and_its_answer_is_not_taken(link, north):
    sent = link.send("north", HEADER, b"abc", 60, "1")
    asked = received(north)
    link.forget([sent])
    assert empty(link)
    assert north.answer(asked, {}, b"late") is False
    sent = link.send("north", HEADER, b"abc", 60, "1")
    pull = north._pull
    north._pull = lambda *args: link.forget([sent]) or pull(*args)  # while it is on its way
    assert north.receive() is None
    assert empty(link) and list(link.collect([sent])) == []


def announced(north, asked):
    """Half an answer: its names have arrived, its bytes have not."""
    message = Message(pack({"half": True}, b"x" * 100), reply_to=asked.message)
    tree, _ = deflate(message)
    bare = message_to_proto(Message(content=RecordDict(), metadata=message.metadata))
    request = PushMessagesRequest(node=north.node, messages_list=[bare], message_object_trees=[tree])
    north.client.PushMessages(request)


@pytest.mark.parametrize("ending", ["forgotten", "given anew"])
def test_half_an_answer_is_none(link, north, ending):
    sent = link.send("north", HEADER, b"abc", 60, "1")
    asked = received(north)
    announced(north, asked)
    assert list(link.collect([sent])) == [] and not empty(link)
    if ending == "given anew":
        assert north.answer(asked, {"half": False}, b"whole")
        (answer,) = collected(link, sent)
        assert (answer.header, answer.body) == ({"half": False}, b"whole")
        assert north.answer(asked, {}, b"twice") is False
    else:
        link.forget([sent])
    assert empty(link)


def test_a_message_that_got_lost_on_the_way_comes_again(consortium, link, north):
    sent = link.send("north", HEADER, b"abc", 60, "1")
    first = link.online()
    north.client.PullMessages(PullMessagesRequest(node=north.node))  # and nobody heard the response
    assert received(north).body == b"abc"
    assert north.receive() is None  # what was confirmed does not
    link.forget([sent])
    link.send("north", HEADER, b"def", 60, "1")
    north.client.PullMessages(PullMessagesRequest(node=north.node))
    north.close()
    assert link.online() == {}
    with consortium.fleet(link, "north") as again:
        again.connect()
        assert set(link.online()) == {"north"} and link.online() != first
        assert received(again).body == b"def"
        assert link.incidents() == []


def test_a_site_that_lost_the_coordinator_connects_again(consortium):
    with ExitStack() as stack:
        link = stack.enter_context(consortium.link())
        north = stack.enter_context(consortium.fleet(link, "north", patience=0.5))
        north.connect()
        token = link.online()
        north.connect()  # still known: the same connection
        assert link.online() == token
        link.send("north", HEADER, b"abc", 60, "1")
        asked = received(north)
        link.__exit__()
        with pytest.raises(Lost, match="cannot be reached any more"):
            north.receive()
        with pytest.raises(Lost, match="cannot be reached any more"):
            north.answer(asked, {}, b"", patience=0.1)
        with pytest.raises(Refused, match="cannot be reached") as refused:
            north.connect()
        assert not refused.value.slowly
        link = stack.enter_context(consortium.link(link.port))
        with pytest.raises(Lost, match="was started anew"):
            north.receive()
        north.connect()
        assert north.answer(asked, {}, b"") is False  # asked by a coordinator that is gone
        exchange(link, north)


class Cable:
    """A way to the coordinator that breaks when so many bytes went over it, and is mended a moment later."""

    def __init__(self, port, breaks):
        self.far, self.breaks, self.bytes, self.ends = port, sorted(breaks), 0, []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        with suppress(OSError):
            while True:
                near, far = self.listener.accept()[0], socket.create_connection(("127.0.0.1", self.far))
                self.ends += near, far
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self.carry, args=pair, daemon=True).start()

    def carry(self, source, target):
        with suppress(OSError), source, target:
            while data := source.recv(65536):
                self.bytes += len(data)
                if self.breaks and self.bytes > self.breaks[0]:
                    self.breaks.pop(0)
                    self.close()
                    time.sleep(0.3)
                target.sendall(data)

    def close(self):
        for end in self.ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def connected(fleet):
    try:
        fleet.connect()
    except Refused:
        return False
    return True


def test_a_link_that_breaks_again_and_again_loses_nothing(consortium, link):
    size = 3 * CHUNK
    cable = Cable(link.port, [1000, *range(size // 2, 2 * size, size // 3)])
    with cable.listener, consortium.fleet(cable, "north") as north:
        with pytest.raises(Refused, match=r"hung up|cannot be reached"):
            north.connect()
        until(lambda: connected(north))
        exchange(link, north, size=size)
        assert cable.breaks == [] and cable.bytes > 2 * size
    assert empty(link)
    cable.close()


def content_in(slot, body, announced):
    """What is read of a response, of which perhaps not all comes, with a slot for a chunk."""
    near, far = socket.socketpair()
    with near, far:
        far.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % announced + body)
        far.shutdown(socket.SHUT_WR)
        answer = http.client.HTTPResponse(near)
        answer.begin()
        return read_response(answer, near, Slot(memoryview(slot)))


@pytest.mark.parametrize("lacking", [0, 1, 12, 13, 32, 33])
def test_a_response_that_is_cut_anywhere_is_none(lacking):
    before, data, slot = before_chunk(12), bytes(range(12)), bytearray(12)
    whole = before + data
    with nullcontext() if not lacking else pytest.raises(http.client.HTTPException):
        assert content_in(slot, whole[: len(whole) - lacking], len(whole)) == before and slot == data


@pytest.mark.parametrize("other", [*map(b"".join, (pulled(None), pulled(b""), pulled(b"Array  0\0")))])
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_response_without_a_chunk_leaves_the_slot_alone(other, size):
    slot = bytearray(size)
    assert content_in(slot, other, len(other)) == other and slot == bytes(size)


def test_a_chunk_that_is_announced_and_lacking_is_none():
    with pytest.raises(http.client.HTTPException, match="lacks it"):
        content_in(bytearray(1000), before_chunk(1000), len(before_chunk(1000)))


def test_an_object_that_is_empty_is_refused(link, north, monkeypatch):
    empty_one = PullObjectResponse(object_found=True, object_available=True).SerializeToString()
    sent = gateway._sent
    monkeypatch.setattr(gateway, "_sent", lambda *a: [empty_one] if isinstance(a[1], Chunk) else sent(*a))
    link.send("north", HEADER, b"abc", 60, "1")
    with pytest.raises(PayloadError, match="an object is empty"):
        received(north)


def test_a_chunk_of_two_arrays_has_one_size(north):
    with pytest.raises(PayloadError, match="different size"):
        north._pull_chunk(north.node, 0, "0" * 64, [memoryview(bytearray(3)), memoryview(bytearray(4))])


def test_half_an_answer_does_not_count_against_the_limit(consortium):
    """A courier is killed again and again while it pushes; its header differs each time, and so its answer."""
    with consortium.link(limit=2 * CHUNK) as link, consortium.fleet(link, "north") as north:
        north.connect()
        sent, body = link.send("north", HEADER, b"abc", 60, "1"), secrets.token_bytes(CHUNK + CHUNK // 2)
        asked, whole = received(north), north.all
        north.all = lambda do, names: whole(do, list(names)[:2])  # killed after two small parts and the chunks
        for attempt in range(3):
            assert north.answer(asked, {"attempt": attempt}, body)
        north.all = whole
        assert north.answer(asked, {"attempt": 3}, body)
        (answer,) = collected(link, sent)
        assert (answer.error, answer.body == body) == ("", True) and empty(link)


def test_no_answer_in_time_and_answers_that_are_none(link, north, monkeypatch):
    sent = link.send("north", HEADER, b"abc", 0.05, "1")
    (answer,) = collected(link, sent)
    assert "no answer came in time" in answer.error and empty(link)
    sent = link.send("north", HEADER, b"abc", 60, "1")
    asked = received(north)
    with monkeypatch.context() as patch:  # by this clock the time to answer is over
        patch.setattr("flwr.app.message.message.now", lambda: now() + datetime.timedelta(hours=1))
        assert north.answer(asked, {}) is False
    records = RecordDict({"header": ConfigRecord({}), "odd": MetricRecord({"a": 1})})
    with monkeypatch.context() as patch:
        patch.setattr("polysite.deploy.flower.client.pack", lambda *_: records)
        assert north.answer(asked, {})
    (answer,) = collected(link, sent)
    assert "not header, odd" in answer.error and empty(link)


def test_an_answer_beyond_the_limit_is_refused(consortium):
    with consortium.link(limit=CHUNK) as link, consortium.fleet(link, "north") as north:
        north.connect()
        sent = link.send("north", HEADER, b"abc", 60, "1")
        asked = received(north)
        with pytest.raises(PayloadError, match="no message of this size"):
            north.answer(asked, {}, secrets.token_bytes(2 * CHUNK))
        (answer,) = collected(link, sent)
        assert f"more than {CHUNK} bytes" in answer.error and empty(link)
        assert [i["site"] for i in link.incidents()] == ["north"]
        exchange(link, north, size=1000)


# What is refused with a sentence


def test_a_link_that_cannot_open_says_why(consortium, link):
    files = consortium.files("server")
    for others, port, sentence in (
        ({}, link.port, "cannot listen at 127.0.0.1"),
        ({"key": consortium.folder / "none.key"}, 0, "there is no file .*none.key"),
        ({"key": consortium.folder / "north.key"}, 0, "are not a certificate and its key"),
        ({"ca": consortium.folder / "north.key"}, 0, "cannot be read as the certificate of the consortium"),
        ({"sites": {"north": b"rubbish"}}, 0, "the key of 'north' cannot be read"),
        ({"sites": dict.fromkeys(("a", "b"), consortium.sites["north"])}, 0, "'b' has the same key as another"),
    ):
        with pytest.raises(RunError, match=sentence):
            Link("127.0.0.1", port, **{**files, "sites": consortium.sites, **others}).__enter__()
    with pytest.raises(RunError, match="'north': it has not connected yet"):
        link.send("north", {}, b"abc", 60, "1")
    with pytest.raises(RunError, match="'east': the sites are north, south"):
        link.send("east", {}, b"", 60, "1")
    assert empty(link)


def test_a_site_that_cannot_connect_says_why(consortium, link, north, monkeypatch):
    late = now() - datetime.timedelta(hours=1)
    for name, others, slowly, sentence in (
        ("unregistered", {}, True, "does not know this site's key"),
        ("north", {}, False, "in use elsewhere"),
        ("south", {"ca": consortium.folder / "other.crt"}, True, "not this consortium's coordinator"),
        ("impostor", {}, None, "certificate"),
        ("south", {"late": True}, False, "the clock of"),
    ):
        with monkeypatch.context() as patch:
            if others.pop("late", False):
                patch.setattr("flwr.supernode.node_auth_http_interceptor.now", lambda: late)
            with consortium.fleet(link, name, **others) as fleet, pytest.raises(Refused, match=sentence) as refused:
                fleet.connect()
            assert slowly in (None, refused.value.slowly)
    with pytest.raises(RunError, match="cannot be read as this site's key"):
        consortium.fleet(link, "nobody")
    with pytest.raises(RunError, match="every 10 s to 30 min"):
        consortium.fleet(link, "north", heartbeat=1)
    exchange(link, north)


# Strangers


@contextmanager
def dialled(consortium, link, name=None, tls=True):
    with socket.create_connection(("127.0.0.1", link.port), timeout=20) as plain:
        if tls:
            with consortium.context(name).wrap_socket(plain, server_hostname="127.0.0.1") as secure:
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


def no_certificate(consortium, link):
    with pytest.raises(OSError), dialled(consortium, link) as connection:
        connection.sendall(b"POST /v1/fleet/activate-node HTTP/1.1\r\n\r\n")
        if not connection.recv(1):
            raise ConnectionResetError
    return "no handshake: PEER_DID_NOT_RETURN_A_CERTIFICATE"


def another_ca(consortium, link):
    with pytest.raises(OSError), dialled(consortium, link, "impostor") as connection:
        connection.sendall(b"POST /v1/fleet/activate-node HTTP/1.1\r\n\r\n")
        if not connection.recv(1):
            raise ConnectionResetError
    return "no handshake: CERTIFICATE_VERIFY_FAILED"


def plain_text(consortium, link):
    with dialled(consortium, link, tls=False) as connection:
        connection.sendall(b"POST /v1/fleet/activate-node HTTP/1.1\r\nHost: a\r\n\r\n")
        hung_up(connection)
    return "no handshake: HTTP_REQUEST"


def garbage(consortium, link):
    with dialled(consortium, link, tls=False) as connection:
        connection.sendall(b"\x16\x03\x01" + bytes(range(256)) * 20)
        hung_up(connection)
    return "no handshake"


def gone_at_once(consortium, link):
    with dialled(consortium, link, tls=False) as connection:
        connection.sendall(b"\x16\x03\x01")
    return "no handshake: cut"


def garbage_inside(consortium, link):
    with dialled(consortium, link, "south") as connection:
        connection.sendall(bytes(range(256)) * 20)
        assert b"400" in hung_up(connection)
    return "not HTTP"


def unregistered_key(consortium, link):
    status, said = consortium.post(link, "unregistered", "pull-messages", consortium.signed("unregistered", "i" * 32))
    assert (status, json.loads(said)) == (401, {"detail": "unregistered"})
    return "a key that is not registered"


def forged_signature(consortium, link):
    headers = consortium.signed("unregistered", "i" * 32)
    headers[FLEET_HTTP_PUBLIC_KEY_HEADER] = consortium.signed("north", "")[FLEET_HTTP_PUBLIC_KEY_HEADER]
    assert consortium.post(link, "unregistered", "pull-messages", headers)[0] == 401
    return "a signature that is not of this key"


def unsigned(consortium, link):
    assert consortium.post(link, "south", "pull-messages", {})[0] == 401
    return "a request without a signature"


def second_place(consortium, link):
    activation = ActivateNodeRequest(public_key=consortium.sites["north"], heartbeat_interval=10).SerializeToString()
    for call, body in (("activate-node", activation), ("pull-messages", b"")):
        status, said = consortium.post(link, "north", call, consortium.signed("north", "i" * 32), body)
        assert (status, json.loads(said)) == (409, {"detail": "elsewhere"})
    return "second place"


def replayed(consortium, link):
    south = Node(node_id=activated(consortium, link, "south"))
    headers = consortium.signed("south", "i" * 32)
    beat = SendNodeHeartbeatRequest(node=south, heartbeat_interval=10).SerializeToString()
    assert consortium.post(link, "south", "send-node-heartbeat", headers, beat)[0] == 200
    status, said = consortium.post(link, "south", "send-node-heartbeat", headers, beat)
    assert (status, json.loads(said)) == (401, {"detail": "replayed"})
    return "a request that was seen before"


def activated(consortium, link, site):
    activation = ActivateNodeRequest(public_key=consortium.sites[site], heartbeat_interval=10).SerializeToString()
    status, _ = consortium.post(link, site, "activate-node", consortium.signed(site, "i" * 32), activation)
    assert status == 200
    return link._nodes[site]


def ten_gigabytes(consortium, link):
    head = "".join(f"{k}: {v}\r\n" for k, v in consortium.signed("south", "i" * 32).items())
    with dialled(consortium, link, "south") as connection:
        connection.sendall(f"POST /v1/fleet/activate-node HTTP/1.1\r\n{head}content-length: {10**10}\r\n\r\n".encode())
        assert b" 413 " in hung_up(connection)
    return f"a request of {10**10} bytes announced"


def without_end(consortium, link):
    head = "".join(f"{k}: {v}\r\n" for k, v in consortium.signed("south", "i" * 32).items())
    with dialled(consortium, link, "south") as connection, suppress(OSError):  # at once, or when all is sent
        connection.sendall(
            f"POST /v1/fleet/activate-node HTTP/1.1\r\n{head}transfer-encoding: chunked\r\n\r\n".encode()
        )
        for _ in range(200):
            connection.sendall(b"100000\r\n" + bytes(1 << 20) + b"\r\n")
        hung_up(connection)
    return "a request that does not announce its size"


def endless_headers(consortium, link):
    with dialled(consortium, link, "south") as connection, suppress(OSError):
        connection.sendall(b"POST /v1/fleet/activate-node HTTP/1.1\r\n")
        for _ in range(2000):
            connection.sendall(b"a: " + b"b" * 10_000 + b"\r\n")
        hung_up(connection)
    return "headers that do not end"


def other_doors(consortium, link):
    context = consortium.context("south")
    for method, path in (
        ("POST", "/v1/fleet/register-node"),
        ("POST", "/v1/control/start-run"),
        ("POST", "/v1/runtime/push-object"),
        ("GET", "/v1/fleet/pull-object"),
        ("GET", "/docs"),
    ):
        connection = http.client.HTTPSConnection("127.0.0.1", link.port, context=context, timeout=20)
        connection.request(method, path, headers=consortium.signed("south", "i" * 32))
        assert connection.getresponse().status == 404
        connection.close()
    return "asked for GET '/docs'"


def in_the_name_of_another(consortium, link):
    activated(consortium, link, "south")
    request = PullObjectRequest(node=Node(node_id=link._nodes["north"]), run_id=link._run, object_id="0" * 64)
    status, _ = consortium.post(
        link, "south", "pull-object", consortium.signed("south", "i" * 32), request.SerializeToString()
    )
    assert status == 403
    return "a request in the name of another"


def crowd(consortium, link):
    """Its own oldest connections give way, not those of others: there is always room for another site."""
    with ExitStack() as stack:
        callers = [stack.enter_context(dialled(consortium, link, "south")) for _ in range(30)]
        assert all(hung_up(caller) == b"" for caller in callers[:22])
        assert consortium.post(link, "north", "pull-messages", {})[0] == 401  # it is heard, though it said nothing
        found = link.incidents()
        assert {i["site"] for i in found if i["what"] == "too many connections"} == {"south"}
        assert {i["count"] for i in found if i["what"] == "too many connections"} == {22}
        stack.enter_context(dialled(consortium, link, "south"))
    return "too many connections"


def idle_callers(consortium, link):
    with ExitStack() as stack:
        callers = [stack.enter_context(dialled(consortium, link, tls=False)) for _ in range(70)]
        hung_up(callers[0])
    return "too many callers at once"


@pytest.mark.parametrize(
    "attack",
    [
        no_certificate,
        another_ca,
        plain_text,
        garbage,
        gone_at_once,
        garbage_inside,
        unregistered_key,
        forged_signature,
        unsigned,
        second_place,
        replayed,
        ten_gigabytes,
        without_end,
        endless_headers,
        other_doors,
        in_the_name_of_another,
        crowd,
        idle_callers,
    ],
    ids=lambda attack: attack.__name__,
)
def test_a_stranger_is_refused_and_noted_and_the_study_unharmed(consortium, study, attack):
    link, north = study
    sent = link.send("north", HEADER, b"before", 60, "1")
    asked = received(north)
    noted = attack(consortium, link)
    assert north.answer(asked, {}, b"after")
    assert [answer.body for answer in collected(link, sent)] == [b"after"]
    incidents = []

    def look():  # the last bytes may still be on their way
        incidents.extend(link.incidents())
        return any(noted in incident["what"] for incident in incidents)

    until(look)
    assert {incident["from"] for incident in incidents if noted in incident["what"]} == {"127.0.0.1"}
    exchange(link, north)


def test_whoever_is_slow_is_dropped_and_the_study_unharmed(consortium):
    with consortium.link(pace=Pace(silence=1.5, window=1, rate=1000)) as link, consortium.fleet(link, "north") as north:
        while not link.online():
            try:
                north.connect()
            except Refused:  # on a busy machine we are slow ourselves
                time.sleep(0.1)

        def handshake():
            with dialled(consortium, link, tls=False) as connection:
                hung_up(connection)

        def headers():
            with dialled(consortium, link, "south") as connection, pytest.raises(OSError):
                for byte in b"POST /v1/fleet/activate-node HTTP/1.1\r\n" * 1000:
                    connection.sendall(bytes([byte]))
                    time.sleep(0.05)

        def body(silent):
            head = "".join(f"{k}: {v}\r\n" for k, v in consortium.signed("south", "i" * 32).items())
            with dialled(consortium, link, "south") as connection:
                connection.sendall(
                    f"POST /v1/fleet/activate-node HTTP/1.1\r\n{head}content-length: 1000\r\n\r\n".encode()
                )
                if silent:
                    assert b" 408 " in hung_up(connection)
                else:
                    with pytest.raises(OSError):
                        for _ in range(900):
                            connection.sendall(b"a")
                            time.sleep(0.1)

        attacks = [handshake, headers, lambda: body(False), lambda: body(True)]
        threads = [threading.Thread(target=attack) for attack in attacks]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            exchange(link, north, size=1000)
        noted = {incident["what"]: incident["count"] for incident in link.incidents()}
        assert noted.pop("headers that do not come") == 1
        assert noted.pop("a request that trickled in") == 2
        assert len(noted) == 1 and "no handshake" in next(iter(noted))


def test_a_flood_of_incidents_stays_small(link):
    for k in range(5000):
        link._admission.note(f"odd {k}", ("127.0.0.1", k))
        link._admission.note("the same", ("127.0.0.1", k))
    found = link.incidents()
    assert len(found) <= 256 and sum(incident["count"] for incident in found) == 10_000
    assert link.incidents() == []


# Records


plain = st.text() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.booleans()
headers = st.dictionaries(
    st.text(), plain | st.lists(st.text()) | st.lists(st.booleans()) | st.lists(st.floats(allow_nan=False))
)


def metadata():
    return Metadata(1, "", 1, 2, "", "", now().timestamp(), 60.0, "train")


def deflated(records):
    tree, objects = deflate(Message(metadata=metadata(), content=records))
    return tree.object_id, {name: each.deflate() for name, each in objects.items()}


@given(headers, st.binary(max_size=100))
@settings(deadline=None)
def test_records_come_back_as_they_went(header, body):
    name, contents = deflated(pack(header, body))
    got, same = unpack(inflate(name, contents, 1000).content)
    assert (got, same) == (header, body)
    assert {k: type(v) for k, v in got.items()} == {k: type(v) for k, v in header.items()}


def test_objects_are_put_together_and_taken_apart_as_protobuf_does():
    content, whole = wrap(bytes(300))["payload"]._chunks[0][1], b"ArrayChunk  300\0" + bytes(300)
    request = PushObjectRequest(node=Node(node_id=1 << 60), run_id=2, object_id="o", session_id="s")
    body = b"".join(pushed(request, content))
    assert PushObjectRequest.FromString(body) == PushObjectRequest(
        node=request.node, run_id=2, object_id="o", session_id="s", object_content=whole
    )
    assert read_pushed(body) == (request, memoryview(whole))
    answer = b"".join(pulled(content))
    assert answer == before_chunk(300) + bytes(300)
    assert PullObjectResponse.FromString(answer).object_content == whole
    assert not PullObjectResponse.FromString(b"".join(pulled(None))).object_found
    waiting = PullObjectResponse.FromString(b"".join(pulled(b"")))
    assert waiting.object_found and not waiting.object_available
    for odd in (body[:-1], b"\xff" * 20, b"\x0b", b"\x0a\x7f"):
        with pytest.raises(DecodeError):
            read_pushed(odd)


def test_an_object_under_a_wrong_name_is_refused():
    chunk = wrap(bytes(300))["payload"]._chunks[0][1]
    sound = memoryview(chunk.deflate())
    assert read_content(chunk.object_id, sound).data == bytes(300)
    for name, content in (("0" * 64, sound), (chunk.object_id, sound[:-1])):
        with pytest.raises(ValueError, match="not the one of its name"):
            read_content(name, content)
    long = memoryview(b"ArrayChunk  5\0" + bytes(300))  # its head is wrong, its name is right
    with pytest.raises(ValueError, match="length"):
        read_content(hashlib.sha256(long).hexdigest(), long)


def test_chunks_have_the_names_that_flower_gives_to_chunks_of_their_size(monkeypatch):
    monkeypatch.setattr("flwr.app.message.array.FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE", CHUNK)
    body = secrets.token_bytes(2 * CHUNK + 5)
    ours, theirs = wrap(body)["payload"], Array("uint8", (len(body),), "safetensors", body)
    assert [name for name, _ in ours.slice_array()] == [name for name, _ in theirs.slice_array()]
    assert ours.object_id == theirs.object_id
    assert [c.deflate() for c in ours.children.values()] == [c.deflate() for c in theirs.children.values()]


def array(dtype="uint8", shape=(3,), stype="safetensors", name="payload"):
    return ArrayRecord({name: Array(dtype, shape, stype, b"abc")})


@pytest.mark.parametrize(
    "records",
    [
        {},
        {"body": array()},
        {"header": MetricRecord({"a": 1})},
        {"header": ConfigRecord({}), "more": ConfigRecord({})},
        {"header": ConfigRecord({"a": b"bytes"})},
        {"header": ConfigRecord({}), "body": ConfigRecord({})},
        {"header": ConfigRecord({}), "body": ArrayRecord()},
        {"header": ConfigRecord({}), "body": array(name="other")},
        {"header": ConfigRecord({}), "body": array(dtype="float32")},
        {"header": ConfigRecord({}), "body": array(shape=(4,))},
        {"header": ConfigRecord({}), "body": array(stype="numpy.ndarray")},
    ],
)
def test_records_that_nobody_packs_are_refused(records):
    with pytest.raises(PayloadError):
        unpack(RecordDict(records))


@pytest.mark.parametrize("value", [None, b"bytes", [1, "a"], [1, True], 2**63, {"a": 1}, [[1]]])
def test_headers_that_are_not_plain_are_refused(value):
    with pytest.raises(PayloadError, match="'field'"):
        pack({"field": value})


def test_contents_that_make_no_message_or_a_huge_one_are_refused():
    name, contents = deflated(pack({}, b"abc"))
    (bomb,) = (each for each, content in contents.items() if content.startswith(b"Array "))
    listed = contents[bomb].replace(b'"arraychunk_ids": [0]', b'"arraychunk_ids": [' + b"0, " * 999 + b"0]")
    for damage, sentence in (
        ({bomb: listed}, "may hold 1000 more bytes, not 3000"),
        ({bomb: listed.replace(b"0, " * 999, b"0, " * 9)}, "not in 10 chunks"),
        ({bomb: b"Array  0\0"}, "not a message"),
        ({bomb: b"rubbish"}, "not a message"),
        ({name: b"Message  3\0abc"}, "not a message"),
        ({name: contents[bomb]}, "is a Array, not a message|not a message"),
    ):
        with pytest.raises(PayloadError, match=sentence):
            inflate(name, contents | damage, 1000)
    with pytest.raises(PayloadError, match="not a message"):
        inflate(name, {name: contents[name]}, 1000)


def test_the_courier_needs_no_torch():
    code = "import sys, polysite.deploy.flower.client; sys.exit(bool({'torch', 'monai'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_only_the_calls_of_a_site_pass():
    assert {call.rpartition("/")[2] for call in CALLS} == {
        *("activate-node", "deactivate-node", "send-node-heartbeat", "pull-messages", "push-messages"),
        *("pull-object", "push-object", "confirm-message-received", "renew-certificate"),
    }
