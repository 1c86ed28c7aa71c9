"""What goes over the connections of the watchdog, and who is let in. Real sockets."""

import json
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace

import pytest

from hvdtrain.runtime.progress import Progress
from hvdtrain.runtime.watchdog import own_addresses, place_of, report_of
from hvdtrain.runtime.watchdog_judge import RankReport
from hvdtrain.runtime.watchdog_loops import (
    AwakeClock,
    Chief,
    Connection,
    Member,
    Offer,
    Settings,
    hello_of,
)
from hvdtrain.world import World
from hvdtrain.world.network import interfaces


@pytest.fixture
def pair():
    a, b = socket.socketpair()
    wires = Connection(a), Connection(b)
    yield wires
    for wire in wires:
        wire.close()


def test_messages_arrive_one_by_one_and_whole(pair):
    left, right = pair
    left.send({"a": 1})
    left.send({"text": "x" * 5000})
    assert [list(m) for m in right.receive()] == [["a"], ["text"]]
    assert right.receive() == []
    assert not right.closed


def test_half_a_message_waits_for_its_rest():
    raw, other = socket.socketpair()
    wire = Connection(other)
    raw.send(b'{"a": ')
    assert wire.receive() == []
    raw.send(b'1}\nno json\n[1]\n')
    assert wire.receive() == [{"a": 1}]
    raw.close()
    assert wire.receive() == []
    assert wire.closed


def test_a_reader_that_reads_nothing_does_not_block_the_writer(pair):
    started = time.monotonic()
    for _ in range(5000):
        pair[0].send({"text": "x" * 1000})
    assert time.monotonic() - started < 1.0
    received = pair[1].receive()
    assert received  # whole messages only
    assert all(m["text"] == "x" * 1000 for m in received)


def test_a_line_without_an_end_closes_the_connection():
    raw, other = socket.socketpair()
    wire = Connection(other)
    raw.setblocking(False)
    raw.send(b"x" * 70000)
    wire.receive()
    assert wire.closed
    raw.close()


def test_time_in_which_the_process_was_stopped_does_not_count():
    clock = AwakeClock()
    time.sleep(0.05)
    assert 0.05 <= clock.now(1.0) < 0.2
    time.sleep(0.1)
    assert clock.now(0.01) < 0.21


class Rank0:
    """The chief's loop in a thread of this process."""

    def __init__(self, hosts=("a", "b", "c"), limit_s=1.0):
        self.verdicts = []
        self.settings = Settings(hang_timeout_s=limit_s, size=len(hosts))
        self.progress = Progress()
        listener = socket.create_server(("127.0.0.1", 0))
        self.offer = Offer(addresses=("127.0.0.1",), port=listener.getsockname()[1],
                           token="secret", hang_timeout_s=limit_s)
        self.loop = Chief([listener], "secret", hosts, {"127.0.0.1"}, self.settings,
                          lambda place: report_of(self.progress, with_place=place),
                          self.verdicts.append)
        self.stopped = False
        self.wake, self.waker = socket.socketpair()
        self.thread = threading.Thread(target=self.loop.run,
                                       args=(self.wake, lambda: self.stopped))
        self.thread.start()

    def close(self):
        self.stopped = True
        self.waker.send(b"x")
        self.thread.join(5)
        self.wake.close()
        self.waker.close()

    def connect(self, rank, token="secret", source="127.0.0.1", **changes):
        """A connection that has said what a member says, with changes."""
        connection = socket.create_connection(("127.0.0.1", self.offer.port), timeout=5,
                                              source_address=(source, 0))
        nonce = json.loads(connection.recv(1000) or b"{}").get("nonce", "")
        hello = hello_of(token, rank, nonce, "n") | changes
        with suppress(ConnectionError):
            connection.sendall(json.dumps(hello).encode() + b"\n")
        return connection


@pytest.fixture
def rank0():
    made = []

    def make(**changes):
        made.append(Rank0(**changes))
        return made[-1]
    yield make
    for chief in made:
        chief.close()


@pytest.mark.parametrize("hello", [
    {"rank": 1, "token": "guess"}, {"rank": 1, "mac": ""}, {"rank": 0}, {"rank": 3},
    {"rank": "1"}, {"rank": True}, {"rank": 1, "mac": ["secret"]}, {"rank": 1, "nonce": "other"},
    {"rank": 1, "source": "127.0.0.2"}])
def test_strangers_are_not_let_in(rank0, hello):
    with rank0().connect(**hello) as connection, suppress(ConnectionResetError):
        assert connection.recv(100) == b""


def test_a_stranger_that_listens_in_place_of_rank_0_is_not_believed(rank0):
    """It has the address of rank 0, but not the token: the member hears no verdict of it."""
    verdicts, wake = [], socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        offer = Offer(addresses=("127.0.0.1",), port=stranger.getsockname()[1], token="secret",
                      hang_timeout_s=1.0)
        member = Member(1, offer, "a", Settings(hang_timeout_s=1.0, size=2),
                        lambda place: report_of(Progress(), with_place=place), verdicts.append)
        stopped = threading.Event()
        thread = threading.Thread(target=member.run, args=(wake[0], stopped.is_set))
        thread.start()
        connection, _ = stranger.accept()
        connection.sendall(b'{"nonce": "0"}\n')
        connection.recv(1000)
        connection.sendall(b'{"alive": true, "mac": ""}\n{"verdict": {"kind": "lost", '
                           b'"causes": [0], "text": "go"}}\n')
        assert connection.recv(1000) == b""
        stopped.set()
        wake[1].send(b"x")
        connection.close()
    thread.join(5)
    assert verdicts == []
    for end in wake:
        end.close()


def test_a_flood_of_silent_connections_keeps_no_rank_out(rank0):
    chief = rank0()
    flood = [socket.create_connection(("127.0.0.1", chief.offer.port)) for _ in range(40)]
    with chief.connect(1) as connection:
        assert b"alive" in connection.recv(200)
    for one in flood:
        one.close()


def test_a_rank_is_answered_and_told_the_end(rank0):
    chief = rank0()
    with chief.connect(1) as connection:
        assert connection.recv(200).startswith(b'{"alive": true, "mac": ')
        chief.stopped = True
        chief.waker.send(b"x")
        rest = b""
        while data := connection.recv(1000):
            rest += data
        assert rest.endswith(b'{"bye": true}\n')


def test_a_lost_rank_of_a_large_job_is_found_as_soon_as_one_of_a_small_one(rank0, monkeypatch):
    """Its ranks report every 20 s."""
    monkeypatch.setattr("hvdtrain.runtime.watchdog_judge.LOST_GRACE_S", 0.5)
    chief = rank0(hosts=["a"] * 4000, limit_s=300.0)
    assert chief.settings.interval_s == 20.0
    with chief.connect(1) as connection:
        assert b"alive" in connection.recv(200)
    began = time.monotonic()
    chief.thread.join(5.0)
    assert time.monotonic() - began < 4.0
    assert [(v.kind, v.causes) for v in chief.verdicts] == [("lost", (1,))]


def test_ranks_that_cannot_connect_are_told_once_and_not_judged(rank0, monkeypatch):
    from hvdtrain.log import get_logger
    lines = []
    monkeypatch.setattr("hvdtrain.runtime.watchdog_loops._MISSING_AFTER_S", 0.2)
    monkeypatch.setattr(get_logger(), "warning", lambda text, *args: lines.append(text % args))
    chief = rank0(limit_s=2.0)
    with chief.connect(2) as connection:
        chief.progress.enter("evaluating")  # which rank 0 may do for long
        time.sleep(0.7)
        connection.sendall(b'{"bye": true}\n')
    missing = [line for line in lines if "does not watch" in line]
    assert len(missing) == 1
    assert f"rank 1: no connection to a, port {chief.offer.port}." in missing[0]
    assert chief.verdicts == []


def member_of(chief, rank, progress, verdicts):
    return Member(rank, chief.offer, "a", replace(chief.settings),
                  lambda place: report_of(progress, with_place=place), verdicts.append)


def test_the_rank_that_does_not_go_on_is_found_and_all_hear_of_it(rank0):
    """Two members and the chief as threads; rank 2 stays behind."""
    chief = rank0(limit_s=0.5)
    told = {1: [], 2: []}
    progress = {rank: Progress() for rank in told}
    wakes = [socket.socketpair() for _ in told]
    threads = [threading.Thread(target=member_of(chief, rank, progress[rank], told[rank]).run,
                                args=(wake[0], lambda: False))
               for rank, wake in zip(told, wakes, strict=True)]
    for thread in threads:
        thread.start()
    for step in range(3):
        for one in (chief.progress, progress[1], *([progress[2]] if step < 2 else [])):
            one.advance(step)
        time.sleep(0.1)
    started = time.monotonic()
    for thread in threads:
        thread.join(5)
    assert time.monotonic() - started < 2.0
    chief.thread.join(5)
    for verdicts in (chief.verdicts, *told.values()):
        assert [(v.kind, v.causes) for v in verdicts] == [("deadlock", (2,))]
        assert verdicts == chief.verdicts
    for wake in wakes:
        for end in wake:
            end.close()


def test_a_rank_tells_where_it_is():
    place, waits = place_of(threading.get_ident())
    assert place.startswith("test_a_rank_tells_where_it_is (test_watchdog_wire.py:")
    assert not waits
    assert place_of(None) == ("", False)
    progress = Progress()
    progress.advance("x" * 500)
    assert report_of(progress, with_place=False) == RankReport(count=1, at="x" * 120, slow=False)


def world(**changes):
    values = {"rank": 0, "size": 4, "local_rank": 0, "local_size": 2, "host": "hosta",
              "starter": "slurm", "rendezvous": "bootstrap", "hosts": ("hosta", "localhost"),
              "slots": (2, 2)} | changes
    return World(**values)


def test_one_host_talks_over_the_loopback():
    assert own_addresses(world(local_size=4), {}) == ("127.0.0.1",)


def test_across_hosts_the_interface_of_the_ranks_comes_first():
    has = interfaces()
    name, address = next((n, a) for n, a in has.items())
    assert own_addresses(world(), {"HOROVOD_GLOO_IFACE": name}) == (address,)
    others = [a for a in has.values() if not a.startswith("127.")]
    assert set(own_addresses(world(hosts=()), {})) == set(others or ["127.0.0.1"])
