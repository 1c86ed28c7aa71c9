"""What a process says it uses, against a transfer and a load that are known."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest

from hvdtrain.bench.usage import Connections, Usage, start_usage

ROOT = Path(__file__).resolve().parents[2]
BYTES = 20_000_000


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def connected():
    """Both ends of a TCP connection within this host."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    return one, other


def send(source, target, count):
    def take():
        left = count
        while left:
            left -= len(target.recv(min(left, 1 << 20)))

    taker = threading.Thread(target=take)
    taker.start()
    source.sendall(bytes(count))
    taker.join()
    deadline = time.monotonic() + 5  # the last acknowledgement is on its way
    while Connections().totals()[0] < count and time.monotonic() < deadline:
        time.sleep(0.01)


def test_bytes_are_those_of_a_transfer_and_stay_when_it_has_closed():
    connections = Connections()
    one, other = connected()
    with closing(one), closing(other):
        send(one, other, BYTES)
        assert connections.totals() == pytest.approx((BYTES, BYTES), rel=0.01)
        send(other, one, BYTES)
        assert connections.totals() == pytest.approx((2 * BYTES, 2 * BYTES), rel=0.01)
    assert connections.totals() == pytest.approx((2 * BYTES, 2 * BYTES), rel=0.01)


def test_what_is_no_tcp_connection_does_not_count():
    connections = Connections()
    pair = socket.socketpair()
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    listening = socket.create_server(("127.0.0.1", 0))
    with pair[0], pair[1], datagrams, listening:
        pair[0].sendall(b"x" * 1000)
        datagrams.sendto(b"x" * 1000, ("127.0.0.1", 9))
        assert connections.totals() == (0, 0)


def test_a_descriptor_that_others_use_is_left_as_it_was():
    one, other = connected()
    with closing(one), closing(other):
        one.setblocking(False)
        before = sorted(os.listdir("/proc/self/fd"))
        Connections().totals()
        assert sorted(os.listdir("/proc/self/fd")) == before
        assert not os.get_blocking(one.fileno())


PROGRAM = """
import os, socket, sys, time
from hvdtrain.bench.usage import start_usage
start_usage("worker0", os.environ)
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as connection:
    connection.sendall(bytes(int(sys.argv[2])))
    while time.process_time() < 1.0:
        pass
    connection.recv(1)
"""


def test_a_process_writes_its_own_figures_and_no_others(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(server.getsockname()[1]), str(BYTES)], cwd=ROOT,
            env=os.environ | {"HVDTRAIN_USAGE": str(tmp_path / "usage")})
        connection, _ = server.accept()
        with connection:
            left = BYTES
            while left:
                left -= len(connection.recv(1 << 20))
            worked = False
            while not worked:
                time.sleep(0.1)
                with suppress(OSError, IndexError, ValueError):  # the first line is on its way
                    worked = read(tmp_path / "usage/worker0.jsonl")[-1]["cpu_s"] > 1.0
            connection.sendall(b"x")
            assert process.wait() == 0
    lines = read(tmp_path / "usage/worker0.jsonl")
    assert lines[-1]["bytes_sent"] == pytest.approx(BYTES, rel=0.01)
    assert lines[-1]["bytes_received"] < 100
    assert 1.0 < lines[-1]["cpu_s"] < 5.0
    assert 5 < lines[-1]["rss_mb"] < 500
    assert [line["time_s"] for line in lines] == sorted(line["time_s"] for line in lines)
    assert len(lines) > 3


def test_nothing_is_written_unasked(tmp_path):
    assert start_usage("rank0", {}) is None
    assert start_usage("rank0", {"HVDTRAIN_USAGE": ""}) is None
    assert not list(tmp_path.iterdir())


def test_a_second_process_of_a_role_goes_on_in_its_file(tmp_path):
    path = tmp_path / "server0.jsonl"
    for _ in range(2):
        usage = Usage(path, interval_s=60)
        usage.stop()
        usage.stop()
    assert len(read(path)) >= 4
