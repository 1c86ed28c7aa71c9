"""`hvdtrain slurm` from the words typed to the script, the file and sbatch."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hvdtrain.cli.main import app
from hvdtrain.errors import ConfigError, HvdtrainError, LaunchError, MachineError

ROOT = Path(__file__).resolve().parents[3]
JOB = str(ROOT / "examples" / "digits_mlp.toml")
READY = sorted((ROOT / "scripts" / "slurm").glob("*.sbatch"))


def invoke(*words: str) -> Result:
    return CliRunner().invoke(app, ["slurm", *words])


def script(*words: str) -> str:
    result = invoke("--ntasks", "2", "--program", "hvdtrain", *words)
    assert result.exit_code == 0, result.exception
    return result.stdout


@pytest.mark.parametrize(("words", "rank"), [
    (("fit", JOB, "--epochs", "3"), f"hvdtrain fit {JOB} --epochs 3"),
    (("--", "fit", JOB), f"hvdtrain fit {JOB}"),
    (("world", "--json"), "hvdtrain world --json"),
    (("--", "python", "a b.py", "--", "-x"), "python 'a b.py' -- -x"),
    (("--", "./fit"), "./fit"),
    (("fit", "--", "a.module"), "hvdtrain fit -- a.module"),
])
def test_an_hvdtrain_command_or_a_program(words: tuple[str, ...], rank: str) -> None:
    assert f"\nrank=({rank})\n" in script(*words)


@pytest.mark.parametrize(("words", "kind", "message"), [
    (("python", "train.py"), LaunchError, "-- python train.py"),
    (("fit", "none.toml"), ConfigError, r"none\.toml"),
    (("fit", "none.py"), ConfigError, "does not exist"),
    (("fit", JOB, "--epochs", "0"), ConfigError, "epochs must be at least 1"),
    (("fit", JOB, "--ps", "2"), ConfigError, r"ps\.servers=2 belongs to engine 'ps'"),
    (("fit", "a.module", "--batch", "global"), ConfigError, "batch has no meaning in a job"),
    (("--set", "epochs=3", "fit", JOB), ConfigError, "option for it: --epochs of hvdtrain fit"),
    (("--set", "epoch=3", "--", "program"), ConfigError, "--set: unknown key 'epoch'"),
    (("--time", "x", "world"), ConfigError, "--time is 'x'"),
    (("--",), LaunchError, "nothing to start"),
])
def test_what_cannot_be_started_is_refused(words: tuple[str, ...], kind: type[HvdtrainError],
                                           message: str) -> None:
    result = invoke("--ntasks", "2", *words)
    assert result.exit_code != 0
    with pytest.raises(kind, match=message):
        raise result.exception or AssertionError(result.output)


def test_a_value_of_env_stays_as_it_was_typed() -> None:
    lines = script("-x", "A= 1, 2 ", "--env", "B", "world").splitlines()
    assert "export A=' 1, 2 '" in lines
    assert "export B" in lines


def test_the_head_is_the_command_that_was_typed() -> None:
    words = ["--ntasks", "1", "--env", "A=line\nbreak", "--", "program", "it's"]
    head = invoke(*words).stdout.splitlines()[1].partition("by: ")[2]
    spoken = subprocess.run(["bash", "-c", f"printf '%s\\0' {head}"], capture_output=True,
                            text=True, check=True).stdout
    assert spoken.split("\0")[:-1] == ["hvdtrain", "slurm", *words]


@pytest.mark.parametrize("path", READY, ids=lambda path: str(path.name))
def test_a_ready_script_is_what_its_command_makes(path: Path, tmp_path: Path,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = path.read_text()
    words = shlex.split(text.splitlines()[1].partition("by: ")[2])
    at = words.index("--script") + 1
    assert words[at] == f"scripts/slurm/{path.name}"
    words[at] = str(tmp_path / "made")
    result = CliRunner().invoke(app, words[1:])
    assert result.exit_code == 0, result.exception
    made = (tmp_path / "made").read_text().splitlines()
    assert made[2:] == text.splitlines()[2:], f"make it anew: {' '.join(words)}"
    assert os.access(tmp_path / "made", os.X_OK)


def test_there_are_ready_scripts() -> None:
    assert len(READY) == 3


def test_a_file_of_another_hand_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "mine.sh"
    path.write_text("#!/bin/bash\necho mine\n")
    result = invoke("--ntasks", "2", "--script", str(path), "world")
    assert isinstance(result.exception, LaunchError)
    assert "not made by hvdtrain" in str(result.exception)
    assert path.read_text() == "#!/bin/bash\necho mine\n"
    path.unlink()
    for nodes in ("1", "2"):
        assert invoke("--ntasks", "2", "-N", nodes, "--script", str(path), "world").exit_code == 0
    assert "#SBATCH --nodes=2\n" in path.read_text()


def fake_sbatch(folder: Path, body: str) -> str:
    path = folder / "sbatch"
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_sbatch_gets_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fake_sbatch(tmp_path, f'echo "$*" > {tmp_path}/args; cat > {tmp_path}/script; '
                                 'echo "4711;cluster"')
    monkeypatch.setenv("PATH", path)
    result = invoke("--ntasks", "2", "--submit", "world")
    assert result.stdout == "4711\n"
    assert (tmp_path / "args").read_text() == "--parsable\n"
    assert "#SBATCH --ntasks=2\n" in (tmp_path / "script").read_text()
    result = invoke("--ntasks", "2", "--submit", "--script", str(tmp_path / "a b.sh"), "world")
    assert (tmp_path / "args").read_text() == f"--parsable {tmp_path}/a b.sh\n"
    assert (tmp_path / "script").read_text() == ""


def test_dry_run_writes_and_submits_nothing(tmp_path: Path,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", fake_sbatch(tmp_path, f"touch {tmp_path}/called"))
    result = invoke("--ntasks", "2", "--submit", "--script", str(tmp_path / "s"), "--dry-run",
                    "world")
    assert result.stdout.startswith("#!/bin/bash\n")
    assert {path.name for path in tmp_path.iterdir()} == {"sbatch"}


def test_what_sbatch_says_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", fake_sbatch(tmp_path, "echo invalid partition >&2; exit 1"))
    result = invoke("--ntasks", "2", "--submit", "world")
    assert isinstance(result.exception, LaunchError)
    assert "sbatch refused the job: invalid partition" in str(result.exception)


def test_a_machine_without_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = invoke("--ntasks", "2", "--submit", "world")
    assert isinstance(result.exception, MachineError)
    assert "There is no sbatch on PATH" in str(result.exception)


def test_a_variable_that_is_promised_must_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROMISED", raising=False)
    result = invoke("--ntasks", "2", "--submit", "-x", "PROMISED", "world")
    assert isinstance(result.exception, LaunchError)
    assert "PROMISED: the variable is not set here" in str(result.exception)


def test_a_variable_without_a_value_is_not_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    text = script("-x", "SECRET", "world")
    assert "export SECRET\n" in text
    assert "hunter2" not in text
