"""The collective of one host: sizes around its slots, ranks that die, nothing left."""

import os
import subprocess
import sys

import numpy as np
import pytest

from tests.shared_files import shared_files

TWO_AND_THREE = [pytest.param(n, marks=pytest.mark.ranks(n, collective="shared-memory"), id=str(n))
                 for n in (2, 3)]


@pytest.mark.parametrize("size", TWO_AND_THREE)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int64"])
def test_sums_of_any_size_are_numpys_and_the_same_bits_on_all_ranks(size, dtype, rank_session, tf):
    """Below and above one slot of 4 MiB, and the limit from which each rank reduces a part."""
    collective, rank = rank_session.collective, rank_session.world.rank
    for lengths in ([1], [0, 3], [7, 65_536], [300_001], [1 << 20, 5], [2_500_000, 1, 700_000]):
        each = [[(np.random.default_rng([r, n]).normal(size=n) * 9).astype(dtype) for n in lengths]
                for r in range(size)]
        got = collective.reduce([tf.constant(a) for a in each[rank]], name="t", op="sum")
        total = np.float32 if dtype == "float16" else dtype
        for position, tensor in enumerate(got):
            wanted = each[0][position].astype(total)
            for others in each[1:]:
                wanted = wanted + others[position].astype(total)
            np.testing.assert_array_equal(tensor, wanted.astype(dtype))
        assert len({part.tobytes() for part in collective.gather_objects(
            np.concatenate([np.ravel(t) for t in got]))}) == 1


@pytest.mark.parametrize("size", TWO_AND_THREE)
def test_more_than_a_slot_is_gathered_exchanged_and_broadcast(size, rank_session, tf):
    collective, rank = rank_session.collective, rank_session.world.rank
    rows = [600_000 * (r + 1) for r in range(size)]
    parts = [np.arange(n * 3, dtype="f4").reshape(n, 3) + r for r, n in enumerate(rows)]
    got = collective.allgather(tf.constant(parts[rank]), name="t.gather")
    np.testing.assert_array_equal(got, np.concatenate(parts))
    each = [np.random.default_rng(r).normal(size=(size * 700_000, 2)) for r in range(size)]
    got = collective.alltoall(tf.constant(each[rank]), name="t.exchange")
    np.testing.assert_array_equal(got, np.concatenate(
        [whole[rank * 700_000:(rank + 1) * 700_000] for whole in each]))
    got = collective.broadcast_array(each[rank], root=size - 1)
    np.testing.assert_array_equal(got, each[-1])


@pytest.mark.parametrize("size", TWO_AND_THREE)
def test_ranks_that_do_different_things_are_told(size, rank_session, tf):
    """Horovod finds that too; without it sums would be wrong without a word."""
    collective, rank = rank_session.collective, rank_session.world.rank
    for mine, other in (
            (lambda: collective.reduce([tf.ones([3])], name="a", op="sum"),
             lambda: collective.reduce([tf.ones([4])], name="a", op="sum")),
            (lambda: collective.gather_objects("x"),
             lambda: collective.broadcast_array(np.ones(3)))):
        with pytest.raises(Exception, match="The ranks do different things: rank . calls"):
            (mine if rank == 0 else other)()
        assert collective.gather_objects(rank) == list(range(size))


PROGRAM = """
import os, signal, sys, time
import numpy as np
import tensorflow as tf
import hvdtrain
session = hvdtrain.init()
assert session.choice.name == "shared-memory", session.choice
rank = session.world.rank
for step in range(1000):
    if rank == 1 and step == 20:
        os.kill(os.getpid(), signal.SIGKILL)
    session.collective.reduce([tf.ones([1000])], name="t", op="sum")
"""


@pytest.mark.parametrize("starter", ["native", "mpirun"])
def test_a_rank_that_is_killed_ends_the_others_and_is_named(tmp_path, starter):
    before = shared_files()
    program = tmp_path / "killed.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "hvdtrain", "launch", "-np", "3", "--starter", starter,
         "--timeout", "200", "--", sys.executable, str(program)],
        text=True, capture_output=True, check=False,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"})
    assert done.returncode == 137, done.stdout + done.stderr
    assert "rank 1" in done.stderr
    assert "SIGKILL" in done.stderr
    assert shared_files() <= before
