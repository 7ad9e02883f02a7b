"""Chunks of an answer are received in place, and no request can change what was verified or belongs to another."""

import secrets
from contextlib import closing, suppress

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polysite.deploy.flower import messages, wire
from polysite.deploy.flower.messages import CHUNK, OBJECT, PART, Chunk, content_of, deflate, pack, wrap
from polysite.deploy.flower.objects import pushed
from wire_ends import HEADER, collected, empty, exchange, received, until

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict  # isort: skip
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import PushObjectRequest, PushObjectResponse

SIZE = 1000  # bytes of a chunk in most tests
BODY = secrets.token_bytes(3 * SIZE + 7)


class Answer:
    """An answer to the next request, which is announced and then pushed part by part."""

    def __init__(self, fleet, body=BODY, header=HEADER):
        self.fleet, asked = fleet, received(fleet)
        self.begin(Message(body if isinstance(body, RecordDict) else pack(header, body), reply_to=asked.message))

    def begin(self, message):
        tree, self.objects = deflate(message)
        self.run, self.reply = message.metadata.run_id, tree.object_id
        bare = message_to_proto(Message(content=RecordDict(), metadata=message.metadata))
        request = PushMessagesRequest(node=self.fleet.node, messages_list=[bare], message_object_trees=[tree])
        request.clientapp_runtime_list.append(0.0)
        self.session = self.fleet.client.PushMessages(request).session_id
        self.chunks = [name for name, each in self.objects.items() if isinstance(each, Chunk)]
        self.small = [name for name in self.objects if name not in self.chunks]

    def parts(self, name, content=None):
        request = PushObjectRequest(node=self.fleet.node, run_id=self.run, session_id=self.session, object_id=name)
        return pushed(request, content or content_of(self.objects[name]))

    def push(self, name, content=None, header=None):
        """Push an object, by default the one of this name and with a header that says so; return whether it was
        stored, or the status of a refusal."""
        headers = {OBJECT: header or name}
        try:
            answer = self.fleet.post("push-object", self.parts(name, content), headers=headers)
        except httpx.HTTPStatusError as refused:
            return refused.response.status_code
        return PushObjectResponse.FromString(answer).stored

    def push_part(self, name, start, data, total=None):
        """Push a part of a chunk; return how much has arrived and whether it is stored, or the status of a refusal."""
        request = PushObjectRequest(node=self.fleet.node, run_id=self.run, session_id=self.session, object_id=name)
        size = len(self.objects[name].data) if total is None else total
        headers = {OBJECT: name, PART: f"{start} {len(data)} {size}"}
        try:
            have, stored = self.fleet.post("push-object", [request.SerializeToString(), data], headers=headers).split()
        except httpx.HTTPStatusError as refused:
            return refused.response.status_code
        return int(have), stored == b"1"

    def push_all(self, names):
        for name in names:
            self.push(name)


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


def answered(link, sent, body=BODY):
    (answer,) = collected(link, sent)
    assert (answer.error, bytes(answer.body)) == ("", bytes(body))
    assert not link._answers.landings and empty(link) and not link._answers._pushed["north"]
    return answer


def landed(link):
    """Whether all chunks of north's answer were received in place."""
    return not link._answers.landings["north"].missing


def no_copy(*_):
    raise AssertionError("an answer was joined by copying")


@pytest.mark.parametrize("size", [3 * CHUNK + 7, CHUNK, 1])
def test_an_answer_is_received_in_place(ends, monkeypatch, size):
    link, north, _ = ends
    monkeypatch.setattr(messages.np, "copyto", no_copy)
    exchange(link, north, size=size)
    assert link.incidents() == []


def test_equal_chunks_are_pushed_once_and_lie_in_all_their_places(ends, small_chunks, monkeypatch):
    link, north, _ = ends
    monkeypatch.setattr(messages.np, "copyto", no_copy)
    sent, body = link.send("north", HEADER, b"", 60, "1"), 3 * BODY[:SIZE] + b"end" + bytes(2 * SIZE)
    assert north.answer(received(north), {}, body)
    answered(link, sent, body)


def test_a_courier_of_the_former_version_is_understood(ends, small_chunks):
    """It pushed chunks first and named no object."""
    link, north, _ = ends
    sent = link.send("north", HEADER, b"", 60, "1")
    answer = Answer(north)
    for name in answer.objects:
        north.post("push-object", answer.parts(name))
        assert not link._answers.landings
    answered(link, sent)


def damaged(answer, k):
    """A chunk of the right size with other bytes."""
    return Chunk(memoryview(bytes(len(answer.objects[answer.chunks[k]].data))))


ATTACKS = {
    "the name of another chunk": lambda a: a.push(a.chunks[1], header=a.chunks[0]) == 400,
    "a chunk in its place, as another": lambda a: a.push(a.chunks[1], a.objects[a.chunks[0]], a.chunks[0]) == 400,
    "other bytes": lambda a: a.push(a.chunks[0], damaged(a, 0)) == 400,
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
@pytest.mark.parametrize("before", [0, 1, 3])
def test_a_push_that_is_wrong_changes_nothing(ends, small_chunks, attack, before):
    link, north, _ = ends
    sent = link.send("north", HEADER, b"", 60, "1")
    answer = Answer(north)
    answer.push_all([*answer.small, *answer.chunks[:before]])
    landing = link._answers.landings["north"]
    verified = bytes(landing.whole[: before * SIZE])
    assert verified == BODY[: before * SIZE]
    ATTACKS[attack](answer)
    assert landing.whole[: before * SIZE] == verified
    answer.push_all(answer.chunks)
    answered(link, sent)
    link.incidents()


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_push_that_is_wrong_is_refused_or_received_elsewhere(ends, small_chunks, attack):
    link, north, _ = ends
    sent = link.send("north", HEADER, b"", 60, "1")
    answer = Answer(north)
    answer.push_all(answer.small)
    assert ATTACKS[attack](answer)
    link.forget([sent])
    link.incidents()
    assert empty(link) and not link._answers.landings


def test_a_verified_chunk_is_not_received_again(ends, small_chunks):
    link, north, _ = ends
    sent = link.send("north", HEADER, b"", 60, "1")
    answer = Answer(north)
    answer.push_all([*answer.small, *answer.chunks[:2]])
    whole = link._answers.landings["north"].whole
    assert answer.push(answer.chunks[0]) is False
    assert answer.push(answer.chunks[0], damaged(answer, 0)) == 400
    assert whole[: 2 * SIZE] == BODY[: 2 * SIZE]
    answer.push_all(answer.chunks[2:])
    assert answered(link, sent).body.obj is whole.obj  # all were received in place
    link.incidents()


def test_another_site_cannot_write_there(ends, small_chunks):
    link, north, south = ends
    sent = link.send("north", HEADER, b"", 60, "1")
    answer = Answer(north)
    answer.push_all(answer.small)
    whole = link._answers.landings["north"].whole
    whole[:] = bytes(len(whole))
    other = object.__new__(Answer)  # south's pushes for north's answer
    other.__dict__ = {**answer.__dict__, "fleet": south}
    assert other.push(answer.chunks[0], damaged(answer, 0)) == 400
    other.push(answer.chunks[1])
    assert whole == bytes(len(whole)) and len(link._answers.landings) == 1
    answer.push_all(answer.chunks)
    answered(link, sent)
    link.incidents()


def test_another_site_cannot_reserve_memory_for_an_answer(ends, small_chunks):
    link, north, south = ends
    sent = link.send("north", HEADER, b"", 60, "1")
    answer = Answer(north)
    other = object.__new__(Answer)
    other.__dict__ = {**answer.__dict__, "fleet": south}
    other.push_all(answer.small)
    assert not link._answers.landings
    answer.push_all(answer.chunks)
    answered(link, sent)


def test_a_request_that_stalls_cannot_write_to_an_answer_that_was_collected(consortium, ends, small_chunks):
    link, north, _ = ends
    sent = link.send("north", HEADER, b"", 60, "1")
    answer = Answer(north)
    answer.push_all([*answer.small, answer.chunks[0]])
    name, instance = answer.chunks[1], link._guard._instances["north"].decode()
    request = b"".join(answer.parts(name, damaged(answer, 1)))
    with closing(consortium.connection(link, "north")) as slow:
        slow.putrequest("POST", "/v1/fleet/push-object")
        headers = {**consortium.signed("north", instance), OBJECT: name, "content-length": str(len(request))}
        for key, value in headers.items():
            slow.putheader(key, value)
        slow.endheaders(request[:-500])
        landing = link._answers.landings["north"]
        until(lambda: name not in landing._free)
        answer.push_all(answer.chunks)
        assert not landed(link)
        found = answered(link, sent)
        slow.send(request[-500:])
        assert slow.getresponse().status == 400
    assert found.body == BODY
    link.incidents()


def test_a_part_that_stalls_cannot_write_after_another_took_over(consortium, ends, small_chunks):
    link, north, _ = ends
    sent = link.send("north", HEADER, b"", 60, "1")
    answer = Answer(north)
    answer.push_all(answer.small)
    name, instance = answer.chunks[1], link._guard._instances["north"].decode()
    data, front = answer.objects[name].data, len(BODY[:SIZE])
    request = PushObjectRequest(node=north.node, run_id=answer.run, session_id=answer.session, object_id=name)
    before = request.SerializeToString()
    with closing(consortium.connection(link, "north")) as slow:
        slow.putrequest("POST", "/v1/fleet/push-object")
        headers = {**consortium.signed("north", instance), OBJECT: name, PART: f"0 {len(data)} {len(data)}"}
        for key, value in {**headers, "content-length": str(len(before) + len(data))}.items():
            slow.putheader(key, value)
        slow.endheaders(before + bytes(data[:400]))
        landing = link._answers.landings["north"]
        until(lambda: name in landing.arrivals and (body := landing.arrivals[name]._body) and body.size >= 400)
        assert answer.push_part(name, 0, b"")[0] == 400  # what has arrived; the former request is over
        with suppress(OSError):
            slow.send(bytes(len(data) - 400))  # other bytes
        assert answer.push_part(name, 400, data[400:]) == (len(data), True)
        assert landing.whole[front : 2 * front] == data
        answer.push_all(answer.chunks)
        assert landed(link)
        assert answered(link, sent).body == BODY
    link.incidents()


def test_parts_that_do_not_fit_are_refused(ends, small_chunks):
    link, north, south = ends
    sent = link.send("north", HEADER, b"", 60, "1")
    answer = Answer(north)
    answer.push_all(answer.small)
    name = answer.chunks[0]
    data = bytes(answer.objects[name].data)
    assert answer.push_part(name, 1, data[1:]) == 416  # nothing has arrived yet
    assert answer.push_part(name, 0, data + b"x") == 416
    assert answer.push_part(name, 0, data, total=SIZE + 1) == 416  # no chunk of this size
    assert answer.push_part("0" * 64, 0, b"", total=SIZE) == (-1, False)
    assert answer.push_part(name, 0, data[:300]) == (300, False)
    assert answer.push_part(name, 0, data) == 416  # not from its beginning again
    other = object.__new__(Answer)  # south's pushes for north's answer
    other.__dict__ = {**answer.__dict__, "fleet": south}
    assert other.push_part(name, 300, data[300:]) == 416
    assert answer.push_part(name, 300, bytes(SIZE - 300)) == 400  # together they are not the chunk of this name
    assert answer.push_part(name, 0, b"") == (-1, False)  # received elsewhere from now on
    answer.push_all(answer.chunks)
    answered(link, sent)
    link.incidents()


PARTS = st.tuples(st.integers(0, 3), st.integers(0, SIZE), st.integers(0, SIZE), st.sampled_from(["right", "zeros"]))


@given(st.lists(PARTS, max_size=10))
@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_answer_arrives_whatever_parts_are_pushed_in_between(ends, small_chunks, parts):
    link, north, _ = ends
    sent = link.send("north", HEADER, b"", 60, "1")
    answer = Answer(north)
    answer.push_all(answer.small)
    for k, start, count, kind in parts:
        data = bytes(answer.objects[answer.chunks[k]].data)[start : start + count]
        answer.push_part(answer.chunks[k], start, data if kind == "right" else bytes(len(data)))
    answer.push_all(answer.chunks)
    answered(link, sent)
    link.incidents()


def test_an_answer_is_joined_after_a_connection_broke(ends, monkeypatch):
    """What had arrived stays, and the rest is received behind it."""
    link, north, _ = ends
    sent, body = link.send("north", HEADER, b"", 60, "1"), secrets.token_bytes(2 * CHUNK)
    asked, pieces, cut = received(north), [], []

    def breaking(parts):
        for piece in whole(parts):
            pieces.append(len(piece))
            if sum(pieces) > CHUNK // 2 and not cut:
                cut.append(True)
                raise ConnectionResetError("cut")
            yield piece

    whole = wire.pieces
    monkeypatch.setattr(wire, "pieces", breaking)
    assert north.answer(asked, {}, body) and cut
    answered(link, sent, body)


def test_an_answer_that_is_collected_is_apart_from_an_equal_one(ends, small_chunks):
    link, north, south = ends
    sent = link.send_all({"north": ({}, b""), "south": ({}, b"")}, 60, "1")
    first, second = Answer(north, header={"from": 1}), Answer(south, header={"from": 2})
    first.push_all([*first.small, *first.chunks])
    second.push_all(second.small)
    (one,) = collected(link, sent["north"])
    one.body[:] = bytes(len(one.body))  # its owner may do that
    (two,) = collected(link, sent["south"])
    assert bytes(two.body) == BODY and empty(link)


@pytest.mark.parametrize("ending", ["forgotten", "replaced"])
def test_memory_is_released_with_the_answer(ends, small_chunks, ending):
    link, north, _ = ends
    sent = link.send("north", HEADER, b"", 60, "1")
    asked = received(north)
    answer = object.__new__(Answer)
    answer.fleet = north
    for attempt in range(3):
        answer.begin(Message(pack({"attempt": attempt}, BODY), reply_to=asked.message))
        if attempt:
            assert not link._answers.landings
        answer.push_all([*answer.small, answer.chunks[0]])
        assert link._answers.landings["north"].reply == answer.reply
        assert len(BODY) < link._answers._pushed["north"] < len(BODY) + 5000
    if ending == "replaced":
        answer.push_all(answer.chunks)
        answered(link, sent)
    else:
        link.forget([sent])
        assert not link._answers.landings and not link._answers._pushed["north"] and empty(link)


def arrays(*bodies):
    record = ArrayRecord()
    for k, body in enumerate(bodies):
        record[str(k)] = wrap(body)["payload"]
    return RecordDict({"header": ConfigRecord({}), "body": record})


def test_memory_is_reserved_for_one_array_of_a_site(ends, small_chunks):
    link, north, _ = ends
    sent = link.send("north", HEADER, b"", 60, "1")
    answer = Answer(north, arrays(BODY, BODY[::-1]))
    answer.push_all(answer.small)
    assert len(BODY) < link._answers._pushed["north"] < len(BODY) + 5000
    answer.push_all(answer.chunks)
    (found,) = collected(link, sent)
    assert "one payload" in found.error and not link._answers.landings


def test_reserved_memory_counts_against_the_limit(ends, small_chunks, monkeypatch):
    link, north, _ = ends
    monkeypatch.setattr("polysite.deploy.flower.answers.SLACK", 2000)
    monkeypatch.setattr(link._answers, "_limit", 4000)
    for bodies, reserved in (([secrets.token_bytes(7000)], False), ([BODY, secrets.token_bytes(3 * SIZE)], True)):
        sent = link.send("north", HEADER, b"", 60, "1")
        answer = Answer(north, arrays(*bodies))
        answer.push_all(answer.small)
        assert bool(link._answers.landings) is reserved
        codes = [answer.push(name) for name in answer.chunks]
        assert 413 in codes
        (found,) = collected(link, sent)
        assert "more than" in found.error and not link._answers.landings
    link.incidents()


PUSHES = st.tuples(st.integers(0, 3), st.integers(0, 4), st.sampled_from(["right", "damaged", "unnamed"]))


@given(st.lists(PUSHES, max_size=8))
@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_answer_arrives_whatever_is_pushed_in_between(ends, small_chunks, pushes):
    link, north, _ = ends
    sent = link.send("north", HEADER, b"", 60, "1")
    answer = Answer(north)
    answer.push_all(answer.small)
    for k, named, kind in pushes:
        header = (*answer.chunks, "none")[named if kind != "unnamed" else 4]
        answer.push(answer.chunks[k], damaged(answer, k) if kind == "damaged" else None, header)
    answer.push_all(answer.chunks)
    answered(link, sent)
    link.incidents()
