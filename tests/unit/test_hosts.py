"""Hostfile dialects, `-H`, and which rank goes where."""

from pathlib import Path

import pytest

from hvdtrain.errors import ConfigError
from hvdtrain.hosts import Host, Slot, assign_ranks, parse_hostfile, parse_hosts, read_hostfile

SAMPLES = Path(__file__).parents[2] / "hostfiles"


@pytest.mark.parametrize(("text", "expected"), [
    ("a slots=4 max_slots=8\n", [("a", 4)]),
    ("a slots = 4\n", [("a", 4)]),
    ("a max-slots=8 slots=2", [("a", 2)]),
    ("a:4\nb:2\n", [("a", 4), ("b", 2)]),
    ("a\nb\na\n", [("a", 2), ("b", 1)]),
    ("# all of it\n\n  a slots=1 # here\n\t\nb", [("a", 1), ("b", 1)]),
    ("node-1.example.org slots=3\r\n10.0.0.7:2\r\n", [("node-1.example.org", 3), ("10.0.0.7", 2)]),
    ("a:4 binding=user:0\n", [("a", 4)]),
])
def test_parse_hostfile_reads_every_dialect(text: str, expected: list[tuple[str, int]]) -> None:
    assert parse_hostfile(text, "f") == tuple(Host(*pair) for pair in expected)


@pytest.mark.parametrize(("text", "line", "found"), [
    ("a slots=4\nb slots=four\n", 2, "'four'"),
    ("a slots=0\n", 1, "'0'"),
    ("\n# c\na:x\n", 3, "'a:x'"),
    ("a slots 4\n", 1, "'slots'"),
    ("a slots=2 colour=red\n", 1, "'colour=red'"),
    ("a:0\n", 1, "'0'"),
    ("a slots=\n", 1, "''"),
    ("-x\n", 1, "'-x'"),
])
def test_parse_hostfile_names_file_and_line_of_a_bad_line(text: str, line: int, found: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_hostfile(text, "hosts.txt")
    assert f"hosts.txt, line {line}: " in str(caught.value)
    assert found in str(caught.value)


@pytest.mark.parametrize("slots", ["0", "00", "-1", "1.5", "+1", "1e3", "", "x", " ", "0x2"])
def test_slots_that_are_no_number_of_ranks_are_refused(slots: str) -> None:
    with pytest.raises(ConfigError, match="at least one slot each"):
        parse_hosts(f"b:1,a:{slots}")
    for line in (f"a:{slots}", f"a slots={slots}"):
        with pytest.raises(ConfigError, match="line 1"):
            parse_hostfile(line, "f")


def test_parse_hostfile_refuses_a_file_without_hosts() -> None:
    with pytest.raises(ConfigError, match=r"hosts\.txt names no host"):
        parse_hostfile("# nothing\n\n", "hosts.txt")


def test_read_hostfile_names_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Cannot read the hostfile"):
        read_hostfile(tmp_path / "none.txt")


@pytest.mark.parametrize(("name", "expected"), [
    ("localhost.txt", (Host("localhost", 4),)),
    ("two-hosts-openmpi.txt", (Host("node1", 4), Host("node2", 4))),
    ("two-hosts-mpich.txt", (Host("node1", 4), Host("node2", 4))),
])
def test_sample_hostfiles_are_read(name: str, expected: tuple[Host, ...]) -> None:
    assert read_hostfile(SAMPLES / name) == expected


def test_every_sample_hostfile_is_tested() -> None:
    assert {path.name for path in SAMPLES.iterdir()} == {
        "localhost.txt", "two-hosts-openmpi.txt", "two-hosts-mpich.txt"}


def test_parse_hosts_reads_slots_and_bare_names() -> None:
    assert parse_hosts("a:4, b,a:1") == (Host("a", 5), Host("b", 1))


@pytest.mark.parametrize("text", ["", "a:", "a:0", "a:4,,b", "a:-1", "a:4:5", "a b"])
def test_parse_hosts_refuses_what_it_cannot_read(text: str) -> None:
    with pytest.raises(ConfigError, match="Expected HOST:SLOTS"):
        parse_hosts(text)


def test_assign_ranks_fills_hosts_in_order_and_numbers_across_as_horovod_does() -> None:
    slots = assign_ranks(parse_hosts("a:2,b:2,c:1"), 5)
    assert [(s.rank, s.host, s.local_rank, s.local_size, s.cross_rank, s.cross_size)
            for s in slots] == [
        (0, "a", 0, 2, 0, 3), (1, "a", 1, 2, 0, 2),
        (2, "b", 0, 2, 1, 3), (3, "b", 1, 2, 1, 2),
        (4, "c", 0, 1, 2, 3)]


def test_assign_ranks_numbers_across_the_hosts_that_have_the_local_rank() -> None:
    slots = assign_ranks(parse_hosts("a:1,b:3,c:2"), 6)
    assert [(s.host, s.local_rank, s.cross_rank, s.cross_size) for s in slots] == [
        ("a", 0, 0, 3), ("b", 0, 1, 3), ("b", 1, 0, 2), ("b", 2, 0, 1),
        ("c", 0, 2, 3), ("c", 1, 1, 2)]


def test_assign_ranks_counts_only_the_ranks_that_run() -> None:
    assert assign_ranks(parse_hosts("a:4,b:4"), 1) == (
        Slot(rank=0, host="a", local_rank=0, local_size=1, cross_rank=0, cross_size=1),)


def test_assign_ranks_names_the_request_and_the_slots() -> None:
    with pytest.raises(ConfigError, match=r"-np 9.*a:4,b:4 has 8 slots"):
        assign_ranks(parse_hosts("a:4,b:4"), 9)


def test_assign_ranks_refuses_no_ranks() -> None:
    with pytest.raises(ConfigError, match="is 0. Expected at least 1"):
        assign_ranks(parse_hosts("a:4"), 0)
