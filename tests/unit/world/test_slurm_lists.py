"""Slurm's host lists and counts."""

import pytest

from hvdtrain.errors import WorldError
from hvdtrain.hosts import expand_counts, expand_hostlist


@pytest.mark.parametrize(("text", "expected"), [
    ("n1", "n1"),
    ("n1,n2", "n1 n2"),
    ("n[1-3]", "n1 n2 n3"),
    ("n[08-11]", "n08 n09 n10 n11"),
    ("n[1-3,07],m2", "n1 n2 n3 n07 m2"),
    ("r[1-2]n[01-02]", "r1n01 r1n02 r2n01 r2n02"),
    ("r[1,3]n[5]-ib.x.org", "r1n5-ib.x.org r3n5-ib.x.org"),
    ("a[098-101]", "a098 a099 a100 a101"),
    ("gpu-node-1,gpu-node-[3-4]", "gpu-node-1 gpu-node-3 gpu-node-4"),
])
def test_expand_hostlist_writes_names_out(text: str, expected: str) -> None:
    assert expand_hostlist(text) == tuple(expected.split())


@pytest.mark.parametrize("text", ["n[1-3", "n1-3]", "n[[1]]", "n[a-b]", "n[3-1]", "n[]", "n[1-]"])
def test_expand_hostlist_refuses_with_the_text(text: str) -> None:
    with pytest.raises(WorldError) as caught:
        expand_hostlist(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(("text", "expected"), [
    ("4", (4,)), ("2(x3),1", (2, 2, 2, 1)), ("1,2(x2)", (1, 2, 2)), ("16(x2)", (16, 16))])
def test_expand_counts_repeats(text: str, expected: tuple[int, ...]) -> None:
    assert expand_counts(text) == expected


@pytest.mark.parametrize("text", ["", "x", "2(3)", "2(x)", "2,,1"])
def test_expand_counts_refuses_with_the_text(text: str) -> None:
    with pytest.raises(WorldError, match="Slurm task counts"):
        expand_counts(text)
