"""`read_launch` reads what typer reads, or nothing."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from hvdtrain.cli import launch as cli_launch
from hvdtrain.cli.main import RANKS_CONTEXT, RanksCommand, launch_command
from hvdtrain.cli.words import Launch, read_launch, words_of
from hvdtrain.launch.options import LaunchOptions
from hvdtrain.settings import settings_in

app = typer.Typer(pretty_exceptions_enable=False)
app.command("launch", cls=RanksCommand, context_settings=RANKS_CONTEXT)(launch_command)
app.command("other")(lambda: None)
OPTIONS = sorted(word for one in settings_in(LaunchOptions).values() if one.text
                 for word in words_of(one))
VALUES = ("2", "-1", "0.5", "nan", "x", "", "a:1,b:2", "A=1", "native", "horovod-gloo", "eth0,lo",
          "-v", "--", "1_0", " 3", "/tmp/a b", "epochs=3")
REST = ([], ["--", "prog"], ["world"], ["--", "prog", "--", "-np", "3"], ["world", "--", "x"],
        ["prog"], ["--"], ["-"], ["--", "-x"], ["--", "--", "x"])


@pytest.fixture
def read_by_typer(monkeypatch: pytest.MonkeyPatch) -> Any:
    found: list[Launch] = []

    def run(typed: Launch) -> int:
        found.append(typed)
        return 0

    monkeypatch.setattr(cli_launch, "run_launch", run)

    def read(words: list[str]) -> Launch | None:
        found.clear()
        CliRunner().invoke(app, ["launch", *words])
        return found[0] if found else None
    return read


def typical(words: str) -> list[str]:
    return words.split()


@pytest.mark.parametrize("words", [
    "-np 2 -- python train.py", "-H a:1,b:1 world", "--hosts=a:4 --preload -v -- prog",
    "--np=3 --timeout 5 --grace=1 -x A=1 --env B -x C=2 --output logs -- prog -np 3",
    "--hostfile hosts --ssh-port 22 --ssh-identity-file key --network-interface eth0,lo -- prog",
    "--starter mpirun --collective horovod-mpi --start-timeout 9 --dry-run --set zero=true -- p",
])
def test_the_usual_is_read(words: str, read_by_typer: Any) -> None:
    found = read_launch(typical(words))
    assert found is not None
    assert found == read_by_typer(typical(words))


@pytest.mark.parametrize("words", [
    "", "--help", "-h", "-np", "-np x -- prog", "-np=2 -- prog", "-vh", "--nope 1 -- prog",
    "--starter slurm -- prog", "--preload=1 -- prog", "-np 2", "-np 2 fit JOB", "-x -- prog"])
def test_the_rest_is_left_to_typer(words: str) -> None:
    assert read_launch(typical(words)) is None


@pytest.mark.parametrize("seed", range(4))
def test_any_words_are_read_as_typer_reads_them(seed: int, read_by_typer: Any) -> None:
    rng, read = random.Random(seed), 0
    for _ in range(60):
        words: list[str] = []
        for _ in range(rng.randrange(4)):
            option, value = rng.choice([*OPTIONS, "--set", "--dry-run"]), rng.choice(VALUES)
            words += rng.choice([[option, value], [f"{option}={value}"], [option]])
        words += rng.choice(REST)
        found = read_launch(words)
        if found is not None:
            read += 1
            assert repr(found) == repr(read_by_typer(words)), words  # a nan is equal in words
    assert read


def test_a_usual_launch_loads_no_typer() -> None:
    program = ("import sys\nsys.argv = ['hvdtrain', 'launch', '-np', '2', '--dry-run', '--', 'p']\n"
               "from hvdtrain.cli.start import main\n"
               "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
               "print(*(m for m in ('typer', 'rich', 'psutil', 'logging', 'hvdtrain.config') "
               "if m in sys.modules))")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          check=True)
    assert done.stdout.splitlines()[-1] == ""
