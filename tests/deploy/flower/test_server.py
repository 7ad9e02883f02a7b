"""Both ends of the wire on real sockets: what goes through, what is refused, and that neither harms the other."""

import ast
import json
import pydoc
import secrets
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path

import pytest

from polysite.deploy.flower import connection, superlink
from polysite.deploy.flower.connection import Lost, Refused
from polysite.deploy.flower.messages import KEY, LAST, START, Letter, digest
from polysite.deploy.flower.port import Pace
from polysite.deploy.flower.server import Link
from polysite.errors import DataError, PayloadError, RunError
from wire_ends import HEADER, LARGE, collected, empty, exchange, hung_up, received, send, until


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
    exchange(link, north, size=LARGE)
    exchange(link, north, size=0)
    assert empty(link) and link.incidents() == []


def test_what_is_forgotten_is_gone_and_its_answer_is_not_taken(link, north):
    sent = send(link, "north", HEADER, b"abc", 60, "1")
    asked = received(north)
    link.forget([sent])
    assert empty(link)
    assert north.answer(asked, {}, b"late") is False
    sent = send(link, "north", HEADER, b"abd", 60, "1")
    fill = north._fill
    north._fill = lambda *args: link.forget([sent]) or fill(*args)  # while it is on its way
    assert north.receive() is None
    assert empty(link) and list(link.collect([sent])) == []


def test_a_message_that_got_lost_on_the_way_comes_again(consortium, link, north):
    sent = send(link, "north", HEADER, b"abc", 60, "1")
    first = link.online()
    north.ask("POST", "next")  # and nobody heard the response
    assert received(north).body == b"abc"
    assert north.receive() is None  # what was received does not
    link.forget([sent])
    send(link, "north", HEADER, b"def", 60, "1")
    north.ask("POST", "next")
    north.close()
    assert link.online() == {}
    with consortium.fleet(link, "north") as again:
        again.connect()
        assert set(link.online()) == {"north"} and link.online() != first
        assert again.receive() is None  # what another start of the courier was given: the study asks anew
        send(link, "north", HEADER, b"ghi", 60, "1")
        assert received(again).body == b"ghi"
        assert link.incidents() == []


def test_a_site_that_lost_the_coordinator_connects_again(consortium):
    with ExitStack() as stack:
        link = stack.enter_context(consortium.link())
        north = stack.enter_context(consortium.fleet(link, "north", patience=0.5))
        north.connect()
        token = link.online()
        north.connect()  # still known: the same connection
        assert link.online() == token
        send(link, "north", HEADER, b"abc", 60, "1")
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


def test_a_body_whose_parts_do_not_belong_together_is_refused(link, north):
    sent = send(link, "north", HEADER, b"abc", 60, "1")
    fill = north._fill

    def cut(came, id):
        came.memory[:1], came.filled, north._fill = b"x", 1, fill
        raise ConnectionResetError

    north._fill = cut
    with pytest.raises(PayloadError, match="its body is not the one of its digest"):
        received(north)
    assert north.receive() is None  # it would be the same again
    link.forget([sent])
    exchange(link, north)


def test_no_answer_in_time(link, north):
    sent = send(link, "north", HEADER, b"abc", 0.05, "1")
    (answer,) = collected(link, sent)
    assert "no answer came in time" in answer.error and empty(link)
    sent = send(link, "north", HEADER, b"abc", 60, "1")
    asked = received(north)
    link._gateway.sent[sent].end = 0.0  # the time to answer is over
    assert north.answer(asked, {}) is False


def test_an_answer_beyond_the_limit_is_refused(consortium):
    with consortium.link(limit=LARGE) as link, consortium.fleet(link, "north") as north:
        north.connect()
        sent = send(link, "north", HEADER, b"abc", 60, "1")
        asked = received(north)
        with pytest.raises(PayloadError, match="no message of this size"):
            north.answer(asked, {}, secrets.token_bytes(2 * LARGE))
        (answer,) = collected(link, sent)
        assert f"more than {LARGE} bytes" in answer.error and empty(link)
        assert [i["site"] for i in link.incidents()] == ["north"]
        exchange(link, north, size=1000)


# What is refused with a sentence


def test_a_link_that_cannot_open_says_why(consortium, link):
    files = consortium.files("server")
    for others, port, sentence in (
        ({}, link.port, "cannot listen at 127.0.0.1"),
        ({"key": consortium.folder / "none.key"}, 0, "none.key are not a certificate and its key: .*No such file"),
        ({"key": consortium.folder / "north.key"}, 0, "are not a certificate and its key"),
        ({"ca": consortium.folder / "north.key"}, 0, "cannot be read as the certificate of the consortium"),
    ):
        with pytest.raises(RunError, match=sentence):
            Link("127.0.0.1", port, **{**files, "sites": consortium.sites, **others}).__enter__()
    with pytest.raises(RunError, match="'north': it has not connected yet"):
        send(link, "north", {}, b"abc", 60, "1")
    with pytest.raises(RunError, match="'east': the sites are north, south"):
        send(link, "east", {}, b"", 60, "1")
    assert empty(link)


class Late(connection.datetime):
    """A clock that is an hour behind."""

    @classmethod
    def now(cls, zone):
        return super().now(zone) - timedelta(hours=1)


def test_a_site_that_cannot_connect_says_why(consortium, link, north, monkeypatch):
    for name, others, slowly, sentence in (
        ("unregistered", {}, True, "does not know this site's key"),
        ("north", {}, False, "in use elsewhere"),
        ("south", {"ca": consortium.folder / "other.crt"}, True, "not this consortium's coordinator"),
        ("impostor", {}, None, "certificate"),
        ("south", {"late": True}, False, "the clock of"),
    ):
        with monkeypatch.context() as patch:
            if others.pop("late", False):
                patch.setattr(connection, "datetime", Late)
            with consortium.fleet(link, name, **others) as fleet, pytest.raises(Refused, match=sentence) as refused:
                fleet.connect()
            assert slowly in (None, refused.value.slowly)
    with pytest.raises(DataError, match=r"nobody\.key is missing"):
        consortium.fleet(link, "nobody")
    exchange(link, north)


# Strangers


POST = b"POST /v1/polysite/connect HTTP/1.1\r\n"


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


def refused(consortium, link, name, headers, call="next", body=b""):
    """The status of a refusal, and its word."""
    status, said = consortium.post(link, name, call, headers, body)
    return status, json.loads(said)["detail"]


def unregistered_key(consortium, link):
    assert refused(consortium, link, "unregistered", consortium.signed("unregistered")) == (401, "unregistered")
    assert refused(consortium, link, "south", {}) == (401, "unsigned")
    return "a key that is not registered"


def forged_signature(consortium, link):
    headers = consortium.signed("unregistered") | {KEY: consortium.signed("north")[KEY]}
    assert refused(consortium, link, "unregistered", headers) == (401, "signature")
    return "a signature that is not of this key"


def second_place(consortium, link):
    for call in ("connect", "next"):
        assert refused(consortium, link, "north", consortium.signed("north"), call) == (409, "elsewhere")
    return "second place"


def connected(consortium, link):
    assert consortium.post(link, "south", "connect", consortium.signed("south"))[0] == 200


def replayed(consortium, link):
    connected(consortium, link)
    headers = consortium.signed("south")
    assert consortium.post(link, "south", "beat", headers)[0] == 200
    assert refused(consortium, link, "south", headers, "beat") == (401, "replayed")
    return "a request that was seen before"


def other_doors(consortium, link):
    flowers = ("fleet/register-node", "fleet/pull-messages", "control/start-run", "runtime/push-object")
    ways = [("POST", f"/v1/{way}") for way in (*flowers, "polysite/run", "polysite/body/1")]
    for method, path in (*ways, ("GET", "/v1/polysite/next"), ("GET", "/docs")):
        assert consortium.ask(link, "south", path, consortium.signed("south"), method=method)[0] == 404
    return "asked for GET '/docs'"


def what_is_of_another(consortium, link):
    """Its requests and answers are those of another site: it can neither read nor write them."""
    connected(consortium, link)
    (sent,) = link._gateway.sent
    letter = Letter(sent, {}, digest(b"bad"), 3)
    assert consortium.post(link, "south", "run", consortium.signed("south"))[0] == 404
    for method, call, body in (("GET", f"body/{sent}", b""), ("POST", f"answer/{sent}", letter.dump())):
        assert consortium.ask(link, "south", f"/v1/polysite/{call}", consortium.signed("south"), body, method)[0] == 410
    assert (
        consortium.ask(link, "south", f"/v1/polysite/upload/{sent}", consortium.signed("south"), b"b", "PUT")[0] == 410
    )
    assert consortium.post(link, "south", "next", consortium.signed("south") | {LAST: sent})[0] == 204
    return "asked for POST '/v1/polysite/run'"


def crowd(consortium, link):
    """Its own oldest connections give way, not those of others: there is always room for another site."""
    with ExitStack() as stack:
        callers = [stack.enter_context(consortium.dialled(link, "south")) for _ in range(30)]
        assert all(hung_up(caller) == b"" for caller in callers[:22])
        assert consortium.post(link, "north", "next", {})[0] == 401  # it is heard, though it said nothing
        found = [(i["site"], i["count"]) for i in link.incidents() if i["what"] == "too many connections"]
        assert found == [("south", 22)]
        stack.enter_context(consortium.dialled(link, "south"))
        assert hung_up(callers[22]) == b""
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
    "ten gigabytes": raw(lambda c: c.head("south", "connect", content_length=10**10), TOO_LARGE, said=b" 413 "),
    "a body without end": raw(
        lambda c: c.head("south", "connect", transfer_encoding="chunked") + 20 * CHUNKED,
        "a request that does not announce its size",
    ),
    "endless headers": raw(POST + 2000 * (b"a: " + b"b" * 10_000 + b"\r\n"), "headers that do not end"),
}
KNOWN = (unregistered_key, forged_signature, second_place, replayed, other_doors)
ATTACKS |= {each.__name__: each for each in (*KNOWN, what_is_of_another, crowd, idle_callers)}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_stranger_is_refused_and_noted_and_the_study_unharmed(consortium, study, name):
    link, north = study
    sent = send(link, "north", HEADER, b"before", 60, "1")
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

        connected(consortium, link)
        asked = [send(link, "south", HEADER, b"", 60, "1") for _ in range(2)]
        head, silent = (consortium.head("south", f"answer/{id}", content_length=1000) for id in asked)
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


# Answers that are uploaded in parts


BODY = secrets.token_bytes(1000)


class Answer:
    """The answer of north to a request: announced, and then uploaded in any parts."""

    def __init__(self, consortium, link, fleet, body=BODY):
        self.consortium, self.link, self.fleet = consortium, link, fleet
        self.sent = send(link, "north", HEADER, b"", 60, "1")
        received(fleet)
        self.letter = Letter(self.sent, {"ok": True}, digest(body), len(body))

    @property
    def arrival(self):
        return self.link._gateway.sent[self.sent].arrival

    def ask(self, method, call, body, headers={}):  # noqa: B006
        """How many bytes have arrived, or the status of a refusal."""
        try:
            return int(self.fleet.ask(method, call, body, headers))
        except connection.Declined as declined:
            return -declined.status

    def announce(self):
        return self.ask("POST", f"answer/{self.sent}", self.letter.dump())

    def upload(self, start, body):
        return self.ask("PUT", f"upload/{self.sent}", body, {START: str(start)})

    @contextmanager
    def stalled(self, body):
        """A connection of north over which an upload comes, but for its last 500 bytes."""
        instance = self.fleet._who["x-polysite-instance"]
        head = self.consortium.head("north", f"upload/{self.sent}", instance, "PUT", content_length=len(body))
        with self.consortium.dialled(self.link, "north") as slow:
            slow.sendall(head + body[:-500])
            until(lambda: self.arrival.arrived == len(body) - 500)
            yield slow

    def arrives(self):
        (answer,) = collected(self.link, self.sent)
        assert (answer.error, bytes(answer.body), answer.header) == ("", BODY, {"ok": True}) and empty(self.link)
        self.link.incidents()
        return answer


@pytest.fixture
def answer(consortium, study):
    return Answer(consortium, *study)


def test_parts_that_do_not_fit_are_refused(answer):
    assert answer.upload(0, BODY) == -416  # it was not announced
    assert answer.ask("POST", f"answer/{answer.sent}", b"[]") == -400
    assert answer.announce() == 0
    assert answer.upload(1, BODY[1:]) == -416  # nothing has arrived yet
    assert answer.upload(0, BODY + b"x") == -416
    assert answer.upload(0, BODY[:300]) == 300
    assert answer.upload(0, BODY) == -416  # not from its beginning again
    assert answer.announce() == 300
    assert answer.ask("PUT", f"upload/{answer.sent}", b"", {START: "-1"}) == -400
    assert answer.upload(300, bytes(700)) == -400  # together they are not the body of this digest
    assert answer.upload(0, BODY) == -416
    assert answer.announce() == 0 and list(answer.link.collect([answer.sent])) == []
    assert answer.upload(0, BODY) == len(BODY)
    assert answer.upload(0, BODY) == -416  # what was verified cannot be written again
    assert answer.announce() == len(BODY)  # it missed the response
    answer.letter = replace(answer.letter, header={})
    assert answer.announce() == -410
    answer.arrives()


def test_an_upload_that_stalls_cannot_write_after_another_took_over(answer):
    assert answer.announce() == 0
    with answer.stalled(BODY[:-500] + bytes(500)) as slow:
        assert answer.announce() == 500  # what has arrived; the former request is over
        with suppress(OSError):
            slow.sendall(bytes(500))  # other bytes
        assert answer.upload(500, BODY[500:]) == len(BODY)
    answer.arrives()


def test_an_upload_that_stalls_cannot_write_to_what_replaced_or_forgot_it(answer):
    assert answer.announce() == 0
    letter, answer.letter = answer.letter, replace(answer.letter, header={"other": 1})
    with answer.stalled(bytes(1000)) as slow:
        former = answer.arrival.memory
        assert answer.announce() == 0  # a courier that was killed answers anew
        assert answer.arrival.memory.obj is not former.obj
        answer.letter = letter
        assert answer.announce() == 0 and answer.upload(0, BODY) == len(BODY)
        with suppress(OSError):
            slow.sendall(bytes(500))
        answer.arrives()


def test_an_answer_of_a_key_that_was_revoked_meanwhile_is_refused(answer, monkeypatch):
    assert answer.announce() == 0 and answer.upload(0, BODY[:500]) == 500
    with monkeypatch.context() as patch:
        patch.setattr(answer.link._admission, "is_revoked", lambda site: True)
        assert answer.upload(500, BODY[500:]) == -403 and list(answer.link.collect([answer.sent])) == []
    assert answer.announce() == len(BODY)
    answer.arrives()


def test_memory_for_which_there_is_no_room_is_refused(answer, monkeypatch):
    def none(size):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("polysite.deploy.flower.gateway.room", none)
        assert answer.announce() == -503
    assert answer.announce() == 0 and answer.upload(0, BODY) == len(BODY)
    answer.arrives()


# Letters


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        b"[" * 100_000,
        b'{"id": 1}',
        b'{"id": "1", "more": 2}',
        b'{"id": "1", "header": []}',
        b'{"id": "1", "size": -1, "digest": "a"}',
        b'{"id": "1", "size": 1}',
        b'{"id": "1", "size": true, "digest": "a"}',
        b'{"id": "1", "size": 1e300, "digest": "a"}',
        b'{"id": "1", "size": 0, "digest": "a"}',
    ],
)
def test_letters_that_nobody_writes_are_refused(text):
    with pytest.raises(PayloadError):
        Letter.load(text)


def test_the_courier_needs_neither_torch_nor_flower():
    code = "import sys, polysite.deploy.flower.client; sys.exit(bool({'torch', 'monai', 'flwr'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_flower_has_the_few_inner_parts_that_are_used():
    state, found = superlink.SuperLink({})._state, set()
    for path in Path(superlink.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            module = getattr(node, "module", None) or ""
            if module.startswith("flwr.") and module != "flwr.app":
                found |= {(pydoc.locate(module), each.name) for each in node.names}
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self._state", "state"):
                found.add((state, node.attr))
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("NodeStatus",):
                found.add((getattr(superlink, node.value.id), node.attr))
    assert 5 < len(found) <= 25
    for owner, name in found:
        assert hasattr(owner, name), f"flwr {version('flwr')}: {owner} {name}"
