"""mpirun and horovodrun as started by us: a fake one on disk tells what it was given."""

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.errors import LaunchError
from hvdtrain.launch.execute import launch
from hvdtrain.launch.facts import Mpirun
from hvdtrain.launch.options import LaunchOptions
from hvdtrain.launch.plan import LaunchPlan, make_plan
from tests.launch_facts import facts


def planned(tmp_path: Path, body: str, **options: Any) -> LaunchPlan:
    """A plan for a fake mpirun with this body."""
    program = tmp_path / "mpirun"
    program.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    program.chmod(0o755)
    machine = facts(mpirun=Mpirun(path=str(program), flavour="openmpi", version="5.0.11"), cores=1)
    options = {"command": ("prog", "a b"), "np": 2, "starter": "mpirun"} | options
    return make_plan(LaunchOptions(**options), {}, machine)


def test_gets_its_arguments_and_environment(tmp_path: Path, capfd: pytest.CaptureFixture[str]
                                            ) -> None:
    body = 'for word; do echo "<$word>"; done; echo $OMPI_MCA_mpi_yield_when_idle $NAME'
    assert launch(planned(tmp_path, body, env=("NAME=x",))) == 0
    out = capfd.readouterr().out.splitlines()
    assert out[-4:] == ["<NAME>", "<prog>", "<a b>", "1 x"]


@pytest.mark.parametrize(("body", "code"), [("exit 9", 9), ("kill -9 $$", 137)])
def test_its_code_is_ours(tmp_path: Path, body: str, code: int) -> None:
    assert launch(planned(tmp_path, body)) == code


def test_the_time_limit_ends_it(tmp_path: Path) -> None:
    started = time.monotonic()
    assert launch(planned(tmp_path, "exec sleep 60", timeout_s=0.1)) == 124
    assert time.monotonic() - started < 1.0


def test_one_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    started = time.monotonic()
    plan = planned(tmp_path, "trap '' TERM; while :; do sleep 0.1; done", timeout_s=0.1,
                   grace_s=0.1)
    assert launch(plan) == 124
    assert time.monotonic() - started < 1.0


def test_one_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    plan = planned(tmp_path, "")
    (tmp_path / "mpirun").unlink()
    with pytest.raises(LaunchError, match="cannot be started"):
        launch(plan)


def test_importing_the_launcher_loads_no_big_library() -> None:
    import subprocess

    program = ("import sys; import hvdtrain.launch.execute, hvdtrain.launch.facts, "
               "hvdtrain.runtime.guard, hvdtrain.runtime.bootstrap, hvdtrain.runtime.meet; "
               "print(*(m for m in ('tensorflow', 'keras', 'numpy', 'horovod', 'mpi4py', 'typer', "
               "'asyncio') if m in sys.modules))")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          check=True, cwd=Path(__file__).parents[3])
    assert done.stdout.strip() == ""
