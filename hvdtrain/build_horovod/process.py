"""Starts the programs that a build needs: argument lists, no shell, output as text."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import EXIT_NOT_STARTED, EXIT_TIME_OVER


@dataclass(frozen=True, kw_only=True)
class Finished:
    """What a program left behind."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """Standard output and error, one after the other."""
        return self.out + self.err


def run(command: Sequence[str | Path], *, env: Mapping[str, str], cwd: Path | None = None,
        timeout_s: float | None = None) -> Finished:
    """Run a program to its end and return its output.

    A program that cannot be started gives code 127, one that runs too long 124.
    """
    try:
        done = subprocess.run([str(word) for word in command], env=dict(env), cwd=cwd, text=True,
                              capture_output=True, timeout=timeout_s, errors="replace",
                              stdin=subprocess.DEVNULL, check=False)
    except OSError as error:
        return Finished(code=EXIT_NOT_STARTED, out="", err=str(error))
    except subprocess.TimeoutExpired as error:
        return Finished(code=EXIT_TIME_OVER, out="", err=f"no end after {error.timeout:.0f} s")
    return Finished(code=done.returncode, out=done.stdout, err=done.stderr)


def run_to_log(command: Sequence[str | Path], *, env: Mapping[str, str], cwd: Path,
               log: Path) -> int:
    """Run a program with all its output in a file; returns its exit code."""
    with log.open("w") as out:
        done = subprocess.run([str(word) for word in command], env=dict(env), cwd=cwd, stdout=out,
                              stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, check=False)
    return done.returncode


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The user's environment without what would leak into a build of Horovod."""
    dropped = {"PYTHONPATH", "PYTHONHOME", "CFLAGS", "LDFLAGS", "CPPFLAGS", "MAKEFLAGS"}
    return {name: value for name, value in environ.items()
            if name not in dropped and not name.startswith("HOROVOD_")}
