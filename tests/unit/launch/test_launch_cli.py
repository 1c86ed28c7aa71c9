"""What is typed after `hvdtrain launch`, and `hvdtrain world`."""

import json
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from hvdtrain.cli.main import (
    RANKS_CONTEXT,
    RanksCommand,
    launch_command,
    render_world,
    world_command,
)
from hvdtrain.errors import ConfigError, LaunchError
from hvdtrain.world import detect_world

app = typer.Typer(pretty_exceptions_enable=False)
app.command("launch", cls=RanksCommand, context_settings=RANKS_CONTEXT)(launch_command)
app.command("world")(world_command)
HVDTRAIN = f"{sys.executable} -m hvdtrain"
ASKED = "env HVDTRAIN_COLLECTIVE=horovod-gloo"


def dry_run(*words: str) -> str:
    """The command of each rank, from a dry run with the native starter."""
    result = CliRunner().invoke(
        app, ["launch", "--dry-run", "--starter", "native", *words], catch_exceptions=False,
        env={"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TF_CPP_MIN_LOG_LEVEL": "2"})
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()[-1]


@pytest.mark.parametrize(("words", "command"), [
    ("-np 2 fit JOB --epochs 3", f"{HVDTRAIN} fit JOB --epochs 3"),
    ("--np 2 fit JOB --seed 7 --dry-run", f"{HVDTRAIN} fit JOB --seed 7 --dry-run"),
    ("-np 2 -- python train.py -x --np 3", "python train.py -x --np 3"),
    ("-np 2 -- prog -- rest", "prog -- rest"),
    ("-np 2 -- fit JOB --epochs 3", f"{HVDTRAIN} fit JOB --epochs 3"),
    ("-np 2 --collective horovod-gloo -- fit JOB",
     f"{ASKED} {HVDTRAIN} fit JOB --collective horovod-gloo"),
    ("-np 2 --collective horovod-gloo -- /opt/bin/hvdtrain fit JOB",
     f"{ASKED} /opt/bin/hvdtrain fit JOB --collective horovod-gloo"),
    ("-np 2 -- ./fit JOB", "./fit JOB"),
    ("-np 2 fit -- JOB", f"{HVDTRAIN} fit -- JOB"),
    ("-H localhost:3 world", f"{HVDTRAIN} world"),
    ("-np 2 --collective horovod-gloo fit JOB",
     f"{ASKED} {HVDTRAIN} fit JOB --collective horovod-gloo"),
    ("-np 2 --collective horovod-gloo fit JOB --collective=horovod-gloo",
     f"{ASKED} {HVDTRAIN} fit JOB --collective=horovod-gloo"),
    ("-np 2 --collective horovod-gloo -- prog", f"{ASKED} prog"),
    ("-np 2 -x A=1 --env B=2 -- prog", "env A=1 B=2 prog"),
    ("-np 2 --set epochs=2 --set zero=true -- prog",
     "env HVDTRAIN_SETTINGS='{\"epochs\": 2, \"zero\": true}' prog"),
])
def test_words_after_the_options_are_the_command(words: str, command: str) -> None:
    assert dry_run(*words.split()) == command


@pytest.mark.parametrize(("words", "error", "message"), [
    ("-np 2 python train.py", LaunchError, "-- python train.py"),
    ("-np 2 train.py", LaunchError, "or -- and a program: hvdtrain launch .* -- train.py"),
    ("-np 2 --", LaunchError, "nothing to start"),
    ("-np 2 -- fit missing.toml", ConfigError, "missing.toml does not exist"),
    ("fit JOB", LaunchError, "number of ranks is not given"),
    ("-np 2 --collective horovod-gloo fit JOB --collective mpi4py", LaunchError, "one of them"),
    ("-np 2 fit JOB --collective mpi4py", LaunchError, "--starter mpirun"),
    ("-np 2 fit JOB --epochs 0", ConfigError, "epochs must be at least 1"),
    ("-np 2 fit JOB --batch global", ConfigError, "batch has no meaning in a job: it says what ba"),
    ("-np 2 --set epochs=0 -- prog", ConfigError, "epochs must be at least 1"),
    ("-np 2 --set xla=true --set sync_batch_norm=true -- prog", ConfigError, "Leave one of the tw"),
    ("-np 2 --set ps.servers=2 -- prog", ConfigError, "ps.servers=2 belongs to engine 'ps'"),
    ("-np 2 --set epochs=3 fit JOB", ConfigError, "--set epochs .* option for it: --epochs of hv"),
    ("-np 2 --set collective=single -- prog", ConfigError, "option for it: --collective."),
])
def test_mistakes_are_told(words: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        dry_run(*words.split())


@pytest.mark.parametrize("words", ["-nq 2 fit JOB", "--colour fit JOB", "-np two fit JOB", "",
                                   "-np 2 fit JOB --colour", "-np 2 fit JOB -- JOB",
                                   "-np 2 fit JOB --epochs three"])
def test_unknown_options_are_refused(words: str) -> None:
    assert CliRunner().invoke(app, ["launch", *words.split()]).exit_code == 2


def test_launch_runs_a_program_and_leaves_with_its_code(capfd: pytest.CaptureFixture[str]) -> None:
    result = CliRunner().invoke(app, ["launch", "-np", "2", "--starter", "native", "--", "/bin/sh",
                                      "-c", "exit 3"])
    assert result.exit_code == 3


def test_world_shows_one_process() -> None:
    text = render_world(detect_world({}, hostname="here"), as_json=False)
    assert text.splitlines()[0] == "rank:        0 of 1"


def test_world_names_the_rank_on_each_line_of_several() -> None:
    world = detect_world({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2",
                          "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"})
    assert all(line.startswith("[rank 1/2] ")
               for line in render_world(world, as_json=False).splitlines())
    assert json.loads(render_world(world, as_json=True))["starter"] == "openmpi"


def test_world_command_reads_this_process() -> None:
    result = CliRunner().invoke(app, ["world", "--json"], env={"SLURM_JOB_ID": None})
    assert json.loads(result.stdout)["size"] == 1


def test_every_rank_answers_world_under_our_launcher(capfd: pytest.CaptureFixture[str],
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    result = CliRunner().invoke(app, ["launch", "-np", "2", "--starter", "native", "world",
                                      "--json"])
    assert result.exit_code == 0
    lines = [line.partition("] ")[2] for line in result.stdout.splitlines()]
    assert sorted(json.loads(line)["rank"] for line in lines) == [0, 1]
