"""The Horovod that `build-horovod` made: its stall check works under Gloo, as do its collectives.

In Horovod 0.28.1 as published the list of ranks stays empty under Gloo, so that a stalled tensor
is neither reported nor ends the job. Each case starts two ranks itself, and all wait together.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from hvdtrain.build_horovod.build import RANK_PROGRAM, run_gloo_ranks
from hvdtrain.build_horovod.toolchain import clean_environment
from hvdtrain.horovod_check import check_horovod
from hvdtrain.process import FinishedProgram
from tests import preload

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
    time.sleep(6)
try:
    total(sys.argv[1] if hvd.rank() == 0 else "late")
except Exception as error:
    print("ENDED", type(error).__name__, str(error)[:200], flush=True)
    sys.exit(9)
print("NOT ENDED", flush=True)
"""


def _environment(**changes: str) -> dict[str, str]:
    return {**clean_environment(os.environ), **preload.environment(),
            "HOROVOD_LOG_LEVEL": "warning", **changes}


def _text(ranks: list[FinishedProgram]) -> str:
    return "\n".join(f"rank {index} code {rank.code}\n{rank.text}"
                     for index, rank in enumerate(ranks))


STALL = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2"}
COLLECTIVES = "collectives"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[FinishedProgram]]:
    """The ranks of every case, started at the same time."""
    program = tmp_path_factory.mktemp("stall") / "stalling.py"
    names = ("both", "lonely")
    for name in names:
        (program.parent / name).mkdir()
        (program.parent / name / program.name).write_text(STALLING)

    def run(name: str) -> list[FinishedProgram]:
        words = ([str(RANK_PROGRAM)] if name == COLLECTIVES else
                 [str(program.parent / name / program.name), name])
        env = _environment() if name == COLLECTIVES else _environment(**STALL)
        return run_gloo_ranks(preload.forked(sys.executable, "-P", *words), env=env,
                              limit_s=120)

    with ThreadPoolExecutor() as pool:
        return dict(zip((*names, COLLECTIVES), pool.map(run, (*names, COLLECTIVES)), strict=True))


@pytest.mark.parametrize("name", ["both", "lonely"], ids=["cached tensor", "new tensor"])
def test_stalled_tensor_is_reported_and_ends_the_job(
        name: str, runs: dict[str, list[FinishedProgram]]) -> None:
    text = _text(runs[name])
    assert "for more than 1 seconds" in text, text
    assert f"Missing ranks:\n1!: [{name}]" in runs[name][0].text, text
    assert "stalled for longer than 2 seconds. Will shutdown" in text, text
    assert [rank.code for rank in runs[name]] == [9, 9], text


def test_collectives_give_the_values_they_must(runs: dict[str, list[FinishedProgram]]) -> None:
    ranks = runs[COLLECTIVES]
    assert [rank.code for rank in ranks] == [0, 0], _text(ranks)
    assert "SELF-TEST OK" in ranks[0].out


def test_static_check_agrees_with_what_runs() -> None:
    assert FOUND.problems == ()
    assert FOUND.gloo
