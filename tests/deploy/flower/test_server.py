"""Both ends of the wire on real sockets: what goes through, what is refused, and that neither harms the other."""

import datetime
import hashlib
import json
import secrets
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from importlib.metadata import version

import pytest
from google.protobuf.message import DecodeError

from polysite.deploy.flower import gateway
from polysite.deploy.flower.connection import Lost, Refused
from polysite.deploy.flower.gateway import Pace
from polysite.deploy.flower.inner_parts import missing_parts
from polysite.deploy.flower.messages import CHUNK, Chunk, deflate, inflate, pack, read_content, unpack, wrap
from polysite.deploy.flower.objects import pulled, pushed, read_pushed
from polysite.deploy.flower.server import Link
from polysite.errors import PayloadError, RunError
from wire_ends import HEADER, collected, empty, exchange, hung_up, received, until

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, Metadata, MetricRecord, RecordDict  # isort: skip
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest
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


def test_an_object_that_is_empty_and_a_chunk_of_two_sizes_are_refused(link, north, monkeypatch):
    empty_one = PullObjectResponse(object_found=True, object_available=True).SerializeToString()
    sent = gateway._sent
    monkeypatch.setattr(gateway, "_sent", lambda *a: [empty_one] if isinstance(a[1], Chunk) else sent(*a))
    link.send("north", HEADER, b"abc", 60, "1")
    with pytest.raises(PayloadError, match="an object is empty"):
        received(north)
    with pytest.raises(PayloadError, match="different size"):
        north._pull_chunk(north.node, 0, "0" * 64, [memoryview(bytearray(3)), memoryview(bytearray(4))])


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


POST = b"POST /v1/fleet/activate-node HTTP/1.1\r\n"


def raw(sent, noted, name="south", tls=True, said=b""):
    """An attack: these bytes are sent, and what the other side says before it closes is read; None: it says nothing."""

    def attack(consortium, link):
        found = b""
        with suppress(OSError), consortium.dialled(link, name, tls) as connection:
            connection.sendall(sent(consortium) if callable(sent) else sent)
            found = hung_up(connection)
        assert not found if said is None else said in found
        return noted

    return attack


def refused(consortium, link, name, headers, call="pull-messages", body=b""):
    """The status of a refusal, and its word."""
    status, said = consortium.post(link, name, call, headers, body)
    return status, json.loads(said)["detail"]


def unregistered_key(consortium, link):
    assert refused(consortium, link, "unregistered", consortium.signed("unregistered")) == (401, "unregistered")
    assert refused(consortium, link, "south", {}) == (401, "unsigned")
    return "a key that is not registered"


def forged_signature(consortium, link):
    key = FLEET_HTTP_PUBLIC_KEY_HEADER
    headers = consortium.signed("unregistered") | {key: consortium.signed("north")[key]}
    assert refused(consortium, link, "unregistered", headers) == (401, "signature")
    return "a signature that is not of this key"


def activation(consortium, site):
    return ActivateNodeRequest(public_key=consortium.sites[site], heartbeat_interval=10).SerializeToString()


def second_place(consortium, link):
    for call, body in (("activate-node", activation(consortium, "north")), ("pull-messages", b"")):
        assert refused(consortium, link, "north", consortium.signed("north"), call, body) == (409, "elsewhere")
    return "second place"


def activated(consortium, link):
    headers, body = consortium.signed("south"), activation(consortium, "south")
    assert consortium.post(link, "south", "activate-node", headers, body)[0] == 200
    return Node(node_id=link._nodes["south"])


def replayed(consortium, link):
    beat = SendNodeHeartbeatRequest(node=activated(consortium, link), heartbeat_interval=10).SerializeToString()
    headers = consortium.signed("south")
    assert consortium.post(link, "south", "send-node-heartbeat", headers, beat)[0] == 200
    assert refused(consortium, link, "south", headers, "send-node-heartbeat", beat) == (401, "replayed")
    return "a request that was seen before"


def other_doors(consortium, link):
    ways = [("POST", f"/v1/{way}") for way in ("fleet/register-node", "control/start-run", "runtime/push-object")]
    for method, path in (*ways, ("GET", "/v1/fleet/pull-object"), ("GET", "/docs")):
        assert consortium.ask(link, "south", path, consortium.signed("south"), method=method)[0] == 404
    return "asked for GET '/docs'"


def in_the_name_of_another(consortium, link):
    activated(consortium, link)
    request = PullObjectRequest(node=Node(node_id=link._nodes["north"]), run_id=link._run, object_id="0" * 64)
    headers, body = consortium.signed("south"), request.SerializeToString()
    assert consortium.post(link, "south", "pull-object", headers, body)[0] == 403
    return "a request in the name of another"


def crowd(consortium, link):
    """Its own oldest connections give way, not those of others: there is always room for another site."""
    with ExitStack() as stack:
        callers = [stack.enter_context(consortium.dialled(link, "south")) for _ in range(30)]
        assert all(hung_up(caller) == b"" for caller in callers[:22])
        assert consortium.post(link, "north", "pull-messages", {})[0] == 401  # it is heard, though it said nothing
        found = [(i["site"], i["count"]) for i in link.incidents() if i["what"] == "too many connections"]
        assert found == [("south", 22)]
        stack.enter_context(consortium.dialled(link, "south"))
    return "too many connections"


def idle_callers(consortium, link):
    with ExitStack() as stack:
        callers = [stack.enter_context(consortium.dialled(link, tls=False)) for _ in range(70)]
        hung_up(callers[0])
    return "too many callers at once"


BYTES, CHUNKED = bytes(range(256)) * 20, b"100000\r\n" + bytes(1 << 20) + b"\r\n"
TOO_LARGE = f"a request of {10**10} bytes announced"
ATTACKS = {
    "no certificate": raw(POST + b"\r\n", "no handshake: PEER_DID_NOT_RETURN_A_CERTIFICATE", None, said=None),
    "another CA": raw(POST + b"\r\n", "no handshake: CERTIFICATE_VERIFY_FAILED", "impostor", said=None),
    "plain text": raw(POST + b"Host: a\r\n\r\n", "no handshake: HTTP_REQUEST", tls=False),
    "garbage": raw(b"\x16\x03\x01" + BYTES, "no handshake", tls=False),
    "garbage inside": raw(BYTES, "not HTTP", said=b"400"),
    "ten gigabytes": raw(lambda c: c.head("south", "activate-node", content_length=10**10), TOO_LARGE, said=b" 413 "),
    "a body without end": raw(
        lambda c: c.head("south", "activate-node", transfer_encoding="chunked") + 20 * CHUNKED,
        "a request that does not announce its size",
    ),
    "endless headers": raw(POST + 2000 * (b"a: " + b"b" * 10_000 + b"\r\n"), "headers that do not end"),
}
KNOWN = (unregistered_key, forged_signature, second_place, replayed, other_doors)
ATTACKS |= {each.__name__: each for each in (*KNOWN, in_the_name_of_another, crowd, idle_callers)}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_stranger_is_refused_and_noted_and_the_study_unharmed(consortium, study, name):
    link, north = study
    sent = link.send("north", HEADER, b"before", 60, "1")
    asked = received(north)
    noted = ATTACKS[name](consortium, link)
    assert north.answer(asked, {}, b"after")
    assert [answer.body for answer in collected(link, sent)] == [b"after"]
    incidents = []

    def look():  # the last bytes may still be on their way
        incidents.extend(link.incidents())
        return any(noted in incident["what"] for incident in incidents)

    until(look)
    assert {incident["from"] for incident in incidents if noted in incident["what"]} == {"127.0.0.1"}
    exchange(link, north, size=1000)


@pytest.mark.parametrize("behind", [0, 303, -3, 307, 3600, -7, -3600])
def test_a_clock_may_be_five_minutes_behind_and_five_seconds_ahead(consortium, study, behind):
    """As the documentation says."""
    said = refused(consortium, study[0], "north", consortium.signed("north", behind=behind))
    assert said == ((401, "clock") if behind > 305 or behind < -5 else (409, "elsewhere"))


def test_whoever_is_slow_is_dropped_and_the_study_unharmed(consortium):
    with consortium.link(pace=Pace(silence=1.5, window=1, rate=1000)) as link, consortium.fleet(link, "north") as north:
        while not link.online():
            try:
                north.connect()
            except Refused:  # on a busy machine we are slow ourselves
                time.sleep(0.1)

        def trickle(sent, rest, pause):
            with consortium.dialled(link, "south") as connection, pytest.raises(OSError):
                connection.sendall(sent)
                for byte in rest:
                    connection.sendall(bytes([byte]))
                    time.sleep(pause)

        head = consortium.head("south", "activate-node", content_length=1000)
        silent = consortium.head("south", "activate-node", content_length=1000)
        attacks = [
            lambda: raw(b"", "", tls=False)(consortium, link),
            lambda: raw(silent, "", said=b" 408 ")(consortium, link),
            lambda: trickle(b"", POST * 1000, 0.05),
            lambda: trickle(head, b"a" * 900, 0.1),
        ]
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


def deflated(records):
    metadata = Metadata(1, "", 1, 2, "", "", now().timestamp(), 60.0, "train")
    tree, objects = deflate(Message(metadata=metadata, content=records))
    return tree.object_id, {name: each.deflate() for name, each in objects.items()}


def test_objects_are_put_together_and_taken_apart_as_protobuf_does():
    content, whole = wrap(bytes(300))["payload"]._chunks[0][1], b"ArrayChunk  300\0" + bytes(300)
    request = PushObjectRequest(node=Node(node_id=1 << 60), run_id=2, object_id="o", session_id="s")
    body = b"".join(pushed(request, content))
    assert PushObjectRequest.FromString(body).object_content == whole and read_pushed(body) == (request, whole)
    assert PullObjectResponse.FromString(b"".join(pulled(content))).object_content == whole
    for odd in (body[:-1], b"\xff" * 20, b"\x0b", b"\x0a\x7f"):
        with pytest.raises(DecodeError):
            read_pushed(odd)


def test_an_object_under_a_wrong_name_is_refused():
    chunk = wrap(bytes(300))["payload"]._chunks[0][1]
    sound, long = chunk.deflate(), b"ArrayChunk  5\0" + bytes(300)  # its head is wrong, its name is right
    assert read_content(chunk.object_id, memoryview(sound)).data == bytes(300)
    for name, content, said in (
        ("0" * 64, sound, "not the one of its name"),
        (chunk.object_id, sound[:-1], "not the one of its name"),
        (hashlib.sha256(long).hexdigest(), long, "length"),
    ):
        with pytest.raises(ValueError, match=said):
            read_content(name, memoryview(content))


def array(dtype="uint8", shape=(3,), stype="safetensors", name="payload"):
    return ArrayRecord({name: Array(dtype, shape, stype, b"abc")})


SOUND = {"header": ConfigRecord({})}
BODIES = [array(name="other"), array(dtype="float32"), array(shape=(4,)), array(stype="numpy.ndarray"), ArrayRecord()]
HEADERS = [{}, {"body": array()}, {"header": MetricRecord({"a": 1})}, {"header": ConfigRecord({"a": b"bytes"})}]


@pytest.mark.parametrize(
    "records",
    [*HEADERS, *({**SOUND, "body": each} for each in (ConfigRecord({}), *BODIES)), {**SOUND, "more": array()}],
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


def test_flower_has_all_inner_parts_that_are_used():
    assert not missing_parts(), f"flwr {version('flwr')} moved or removed these"
