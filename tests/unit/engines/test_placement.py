"""How parameters are cut and placed."""

import math

import pytest

from hvdtrain.engines.parameter_server.placement import cut, place, render

MLP = tuple((shape, 4) for shape in [
    (784, 512), (512,), (512, 512), (512,), (512, 10), (10,)])


def loads(pieces, servers):
    return [sum(p.bytes for p in pieces if p.server == s) for s in range(servers)]


def test_round_robin_puts_all_kernels_on_one_of_two_servers():
    found = loads(place(MLP, servers=2, policy="round_robin"), 2)
    assert found == [(784 * 512 + 512 * 512 + 512 * 10) * 4, (512 + 512 + 10) * 4]


def test_greedy_balances_by_bytes():
    found = loads(place(MLP, servers=2, policy="greedy"), 2)
    assert max(found) == 784 * 512 * 4  # no piece is cut: the largest one alone
    found = loads(place(MLP, servers=2, policy="greedy", partitioner="fixed:2"), 2)
    assert max(found) / min(found) < 1.01


@pytest.mark.parametrize(("partitioner", "expected"), [
    ("none", [10]), ("fixed:3", [4, 3, 3]), ("fixed:99", [1] * 10),
    # 10 rows of 8 bytes
    ("min_size:20", [3, 3, 2, 2]), ("min_size:20:2", [5, 5]), ("min_size:1000", [10]),
    ("max_size:20", [2] * 5), ("max_size:20:3", [4, 3, 3]), ("max_size:1", [1] * 10)])
def test_pieces_are_whole_rows(partitioner, expected):
    pieces = cut((10, 2), 4, partitioner)
    assert [rows for _, rows in pieces] == expected
    assert [start for start, _ in pieces] == [sum(expected[:i]) for i in range(len(expected))]


def test_a_scalar_has_one_piece():
    pieces = place([((), 4)], servers=3, policy="greedy",
                   partitioner="fixed:4")
    assert [(p.shape, p.size, p.bytes) for p in pieces] == [((), 1, 4)]


@pytest.mark.parametrize("partitioner", ["none", "fixed:3", "min_size:4096", "max_size:100000:7"])
@pytest.mark.parametrize("servers", [1, 2, 5])
def test_every_number_lies_on_one_server(partitioner, servers):
    pieces = place(MLP, servers=servers, policy="greedy", partitioner=partitioner)
    for number, (shape, item_bytes) in enumerate(MLP):
        own = [p for p in pieces if p.parameter == number]
        assert sum(p.bytes for p in own) == math.prod(shape) * item_bytes
        assert [p.start for p in own] == sorted(p.start for p in own)
    assert {p.server for p in pieces} <= set(range(servers))


def test_the_plan_says_what_lies_where():
    lines = render(place(MLP, servers=2, policy="greedy", partitioner="fixed:2"), 2)
    assert lines[0].startswith("server 0: ")
    assert "(50%)" in lines[0]
    assert "6 pieces of 6 of 6 parameters" in lines[1]
