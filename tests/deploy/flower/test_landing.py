"""Chunks of an answer are received in place, and no request can change what was verified or belongs to another."""

import copy
import secrets
from contextlib import contextmanager, suppress

import httpx
import pytest

from polysite.deploy.flower import messages
from polysite.deploy.flower.client import _Outgoing
from polysite.deploy.flower.messages import CHUNK, OBJECT, PART, Chunk, content_of, deflate, pack, wrap
from polysite.deploy.flower.objects import pushed
from wire_ends import HEADER, collected, empty, exchange, hung_up, received, until

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict  # isort: skip
from flwr.proto.message_pb2 import PushObjectRequest, PushObjectResponse

SIZE = 1000  # bytes of a chunk in most tests
BODY = secrets.token_bytes(3 * SIZE + 7)


class Answer:
    """The answer of a site to a request, which is announced and then pushed part by part, the small parts at once."""

    def __init__(self, link, fleet, body=BODY, begun=True, site="north"):
        self.link, self.fleet, self.body = link, fleet, body
        self.sent = link.send(site, HEADER, b"", 60, "1")
        self.asked = received(fleet)
        self.announce(body if isinstance(body, RecordDict) else pack(HEADER, body))
        if begun:
            self.push_all(self.small)

    def announce(self, records):
        message = Message(records, reply_to=self.asked.message)
        leaving = _Outgoing(self.asked, message, *deflate(message))
        self.objects, self.run, self.reply = leaving.objects, leaving.run, leaving.tree.object_id
        self.session = self.fleet.client.PushMessages(leaving.announcement(self.fleet.node)).session_id
        self.chunks = [name for name in self.objects if leaving.is_chunk(name)]
        self.small = [name for name in self.objects if not leaving.is_chunk(name)]

    @property
    def landing(self):
        return self.link._answers.landings["north"]

    @property
    def counted(self):
        """Bytes that count against the limit."""
        return self.link._answers._pushed["north"]

    def by(self, fleet):
        """The same answer as another site pushes it."""
        other = copy.copy(self)
        other.fleet = fleet
        return other

    def data(self, k):
        return bytes(self.objects[self.chunks[k]].data)

    def request(self, name):
        return PushObjectRequest(node=self.fleet.node, run_id=self.run, session_id=self.session, object_id=name)

    def post(self, parts, **headers):
        """What is answered, or the status of a refusal."""
        try:
            return self.fleet.post("push-object", parts, headers=headers)
        except httpx.HTTPStatusError as refused:
            return refused.response.status_code

    def push(self, name, content=None, header=None):
        """Push an object, by default the one of this name and with a header that says so; return whether it was
        stored, or the status of a refusal."""
        parts = pushed(self.request(name), content or content_of(self.objects[name]))
        answer = self.post(parts, **{OBJECT: name if header is None else header})
        return answer if isinstance(answer, int) else PushObjectResponse.FromString(answer).stored

    def push_part(self, name, start, data, total=SIZE):
        """Push a part of a chunk; return how much has arrived and whether it is stored, or the status of a refusal."""
        parts = [self.request(name).SerializeToString(), data]
        answer = self.post(parts, **{OBJECT: name, PART: f"{start} {len(data)} {total}"})
        return answer if isinstance(answer, int) else tuple(map(int, answer.split()))

    def push_all(self, names):
        for name in names:
            self.push(name)

    def arrives(self):
        """Push all chunks; the answer is whole, and nothing is left."""
        self.push_all(self.chunks)
        (answer,) = collected(self.link, self.sent)
        assert (answer.error, bytes(answer.body)) == ("", bytes(self.body))
        assert not self.link._answers.landings and empty(self.link) and not self.counted
        self.link.incidents()
        return answer


@pytest.fixture(scope="module")
def ends(consortium):
    with consortium.link(limit=8 * CHUNK) as link, consortium.fleet(link, "north") as north:
        north.connect()
        with consortium.fleet(link, "south") as south:
            south.connect()
            yield link, north, south


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(messages, "CHUNK", SIZE)


@pytest.fixture
def answer(ends, small_chunks):
    return Answer(*ends[:2])


@pytest.fixture
def nothing_is_copied(monkeypatch):
    def no_copy(*_):
        raise AssertionError("an answer was joined by copying")

    monkeypatch.setattr(messages.np, "copyto", no_copy)


@pytest.mark.parametrize("size", [3 * CHUNK + 7, CHUNK, 1])
def test_an_answer_is_received_in_place(ends, nothing_is_copied, size):
    link, north, _ = ends
    exchange(link, north, size=size)
    assert link.incidents() == []


def test_equal_chunks_are_pushed_once_and_lie_in_all_their_places(ends, small_chunks, nothing_is_copied):
    link, north, _ = ends
    sent, body = link.send("north", HEADER, b"", 60, "1"), 3 * BODY[:SIZE] + b"end" + bytes(2 * SIZE)
    assert north.answer(received(north), {}, body)
    assert bytes(collected(link, sent)[0].body) == body and empty(link)


def damaged(answer, k):
    """A chunk of the right size with other bytes."""
    return Chunk(memoryview(bytes(len(answer.data(k)))))


ATTACKS = {  # each with whether it is refused, or received elsewhere
    "the name of another chunk": lambda a: a.push(a.chunks[1], header=a.chunks[0]) == 400,
    "a chunk in its place, as another": lambda a: a.push(a.chunks[1], a.objects[a.chunks[0]], a.chunks[0]) == 400,
    "other bytes again": lambda a: [a.push(a.chunks[0], damaged(a, 0)) for _ in range(2)] == [400, 400],
    "a longer object": lambda a: a.push(a.chunks[0], bytes(2 * SIZE)) == 400,
    "no chunk, of the size of one": lambda a: (
        a.push(a.chunks[0], content_of(a.objects[a.chunks[0]]).deflate()[1:]) == 400
    ),
    "an unknown name": lambda a: a.push("0" * 64, damaged(a, 0)) == 400,
    "a name that is none": lambda a: a.push(a.chunks[0], header="none") is True,
    "a chunk that is shorter than its place": lambda a: a.push(a.chunks[3], header=a.chunks[0]) is True,
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("before", [0, 3])
def test_a_push_that_is_wrong_is_refused_or_received_elsewhere_and_changes_nothing(answer, attack, before):
    answer.push_all(answer.chunks[:before])
    landing = answer.landing
    assert not before or answer.push(answer.chunks[0]) is False  # it is not received again
    assert ATTACKS[attack](answer) or before
    assert landing.whole[: before * SIZE] == BODY[: before * SIZE]
    answer.arrives()


def test_another_site_cannot_write_there(ends, answer):
    other, whole = answer.by(ends[2]), answer.landing.whole
    whole[:] = bytes(len(whole))
    assert other.push(answer.chunks[0], damaged(answer, 0)) == 400
    other.push(answer.chunks[1])
    assert whole == bytes(len(whole)) and len(ends[0]._answers.landings) == 1
    answer.arrives()


def test_another_site_cannot_reserve_memory_for_an_answer(ends, small_chunks):
    answer = Answer(*ends[:2], begun=False)
    answer.by(ends[2]).push_all(answer.small)
    assert not ends[0]._answers.landings
    answer.arrives()


@contextmanager
def stalled(consortium, answer, body, **headers):
    """A connection of north over which all of this request has come but its last 500 bytes."""
    head = consortium.head(
        "north", "push-object", answer.link._guard._instances["north"].decode(), content_length=len(body), **headers
    )
    with consortium.dialled(answer.link, "north") as slow:
        slow.sendall(head + body[:-500])
        yield slow


def test_a_request_that_stalls_cannot_write_to_an_answer_that_was_collected(consortium, answer):
    answer.push(answer.chunks[0])
    name, landing = answer.chunks[1], answer.landing
    body = b"".join(pushed(answer.request(name), damaged(answer, 1)))
    with stalled(consortium, answer, body, **{OBJECT: name}) as slow:
        until(lambda: name not in landing._free)
        found = answer.arrives()
        assert landing.missing  # not all were received in place
        slow.sendall(body[-500:])
        assert b" 400 " in hung_up(slow)
    assert found.body == BODY
    answer.link.incidents()


def test_a_part_that_stalls_cannot_write_after_another_took_over(consortium, answer):
    name, data, landing = answer.chunks[1], answer.data(1), answer.landing
    body = answer.request(name).SerializeToString() + data
    with stalled(consortium, answer, body, **{OBJECT: name, PART: f"0 {SIZE} {SIZE}"}) as slow:
        until(lambda: name in landing.arrivals and (came := landing.arrivals[name]._body) and came.size >= SIZE - 500)
        assert answer.push_part(name, 0, b"")[0] == 500  # what has arrived; the former request is over
        with suppress(OSError):
            slow.sendall(bytes(500))  # other bytes
        assert answer.push_part(name, 500, data[500:]) == (SIZE, True)
        assert landing.whole[SIZE : 2 * SIZE] == data
        assert answer.arrives().body.obj is landing.whole.obj


def test_parts_that_do_not_fit_are_refused(ends, answer):
    name, data = answer.chunks[0], answer.data(0)
    assert answer.push_part(name, 1, data[1:]) == 416  # nothing has arrived yet
    assert answer.push_part(name, 0, data + b"x") == 416
    assert answer.push_part(name, 0, data, total=SIZE + 1) == 416  # no chunk of this size
    assert answer.push_part("0" * 64, 0, b"") == (-1, False)
    assert answer.push_part(name, 0, data[:300]) == (300, False)
    assert answer.push_part(name, 0, data) == 416  # not from its beginning again
    assert answer.by(ends[2]).push_part(name, 300, data[300:]) == 416
    assert answer.push_part(name, 300, bytes(SIZE - 300)) == 400  # together they are not the chunk of this name
    assert answer.push_part(name, 0, b"") == (-1, False)  # received elsewhere from now on
    answer.arrives()


def test_an_answer_that_is_collected_is_apart_from_an_equal_one(ends, small_chunks):
    link, north, south = ends
    first, second = Answer(link, north), Answer(link, south, site="south")
    first.push_all(first.chunks)
    (one,) = collected(link, first.sent)
    one.body[:] = bytes(len(one.body))  # its owner may do that
    (two,) = collected(link, second.sent)
    assert bytes(two.body) == BODY and empty(link)


@pytest.mark.parametrize("ending", ["forgotten", "replaced"])
def test_memory_is_released_with_the_answer(answer, ending):
    """A courier is killed again and again while it pushes; its header differs each time, and so its answer."""
    for attempt in range(3):
        answer.announce(pack({"attempt": attempt}, BODY))
        assert not answer.link._answers.landings
        answer.push_all([*answer.small, answer.chunks[0]])
        assert answer.landing.reply == answer.reply and list(answer.link.collect([answer.sent])) == []
        assert len(BODY) < answer.counted < len(BODY) + 5000
    if ending == "replaced":
        answer.arrives()
    else:
        answer.link.forget([answer.sent])
        assert not answer.link._answers.landings and not answer.counted and empty(answer.link)


def arrays(*bodies):
    record = ArrayRecord()
    for k, body in enumerate(bodies):
        record[str(k)] = wrap(body)["payload"]
    return RecordDict({"header": ConfigRecord({}), "body": record})


@pytest.mark.parametrize("sizes, reserved", [([7000], False), ([3007, 3000], True)])
def test_reserved_memory_counts_against_the_limit(ends, small_chunks, monkeypatch, sizes, reserved):
    link, north, _ = ends
    monkeypatch.setattr("polysite.deploy.flower.answers.SLACK", 2000)
    monkeypatch.setattr(link._answers, "_limit", 4000)
    answer = Answer(link, north, arrays(*map(secrets.token_bytes, sizes)))
    assert bool(link._answers.landings) is reserved
    assert 413 in [answer.push(name) for name in answer.chunks]
    (found,) = collected(link, answer.sent)
    assert "more than" in found.error and not link._answers.landings
    link.incidents()
