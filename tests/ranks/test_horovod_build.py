"""The Horovod that `build-horovod` made: its stall check works under Gloo, as do its collectives.

In Horovod 0.28.1 as published the list of ranks stays empty under Gloo, so that a stalled tensor
is neither reported nor ends the job. Each test starts two processes itself.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from hvdtrain.build_horovod.process import Finished, clean_environment
from hvdtrain.build_horovod.selftest import RANK_PROGRAM, run_gloo_ranks
from hvdtrain.horovod_check import check_horovod

FOUND = check_horovod()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOUND.installed, reason="Horovod is not installed"),
]

# Rank 1 never submits the tensor; its next call, long after the limit, must fail as well.
STALLING = """
import pathlib, sys, time
import tensorflow as tf
import horovod.tensorflow as hvd

hvd.init()
value = tf.Variable(1.0)

@tf.function
def total(name):
    return hvd.allreduce(value.read_value(), op=hvd.Sum, name=name)

def meet(folder):
    # Without a collective, which the stall check would watch: a busy machine is no stall.
    (folder / f"ready{hvd.rank()}").touch()
    while not all((folder / f"ready{rank}").exists() for rank in range(2)):
        time.sleep(0.01)

for name in ("both", "lonely", "late"):
    total.get_concrete_function(name)
meet(pathlib.Path(__file__).parent)
for _ in range(3):
    assert float(total("both")) == 2.0
if hvd.rank() == 1:
    time.sleep(12)
try:
    total(sys.argv[1] if hvd.rank() == 0 else "late")
except Exception as error:
    print("ENDED", type(error).__name__, str(error)[:200], flush=True)
    sys.exit(9)
print("NOT ENDED", flush=True)
"""


def _environment(**changes: str) -> dict[str, str]:
    return {**clean_environment(os.environ), "TF_CPP_MIN_LOG_LEVEL": "3",
            "HOROVOD_LOG_LEVEL": "warning", **changes}


def _text(ranks: list[Finished]) -> str:
    return "\n".join(f"rank {index} code {rank.code}\n{rank.text}"
                     for index, rank in enumerate(ranks))


@pytest.mark.parametrize("name", ["both", "lonely"], ids=["cached tensor", "new tensor"])
def test_stalled_tensor_is_reported_and_ends_the_job(name: str, tmp_path: Path) -> None:
    program = tmp_path / "stalling.py"
    program.write_text(STALLING)
    env = _environment(HOROVOD_STALL_CHECK_TIME_SECONDS="2",
                       HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="4")
    start = time.monotonic()
    ranks = run_gloo_ranks([sys.executable, "-P", str(program), name], env=env, timeout_s=90)
    seconds = time.monotonic() - start
    text = _text(ranks)
    assert "for more than 2 seconds" in text, text
    assert f"Missing ranks:\n1!: [{name}]" in ranks[0].text, text
    assert "stalled for longer than 4 seconds. Will shutdown" in text, text
    assert [rank.code for rank in ranks] == [9, 9], f"after {seconds:.0f} s\n{text}"


def test_collectives_give_the_values_they_must() -> None:
    ranks = run_gloo_ranks([sys.executable, "-P", str(RANK_PROGRAM)], env=_environment(),
                           timeout_s=120)
    assert [rank.code for rank in ranks] == [0, 0], _text(ranks)
    assert "SELF-TEST OK" in ranks[0].out


def test_static_check_agrees_with_what_runs() -> None:
    assert FOUND.problems == ()
    assert FOUND.gloo
