"""From a fork of the preloaded process to a process of its own, and the program that it runs."""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import os
import random
import runpy
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Literal

_PR_SET_PDEATHSIG = 1
_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_SHEBANG_BYTES = 256

_forked: list[int] = []
_shown: list[mmap.mmap] = []
"""What `/proc` shows of this process; it must stay in its memory."""


def is_forked() -> bool:
    """Whether this process is a fork of a preloaded one, whose memory it shares."""
    return os.getpid() in _forked


@dataclass(frozen=True, kw_only=True)
class Program:
    """A Python program, as one would type it."""

    kind: Literal["path", "module", "code"]
    what: str
    """The path of the script, the name of the module, or the text."""
    argv: tuple[str, ...]
    """`sys.argv[1:]`."""
    unbuffered: bool = False
    safe_path: bool = False
    """Whether neither the script's folder nor the working directory is on the path (`-P`)."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a child is to be."""

    program: Program
    env: Mapping[str, str]
    cwd: str
    streams: Sequence[int]
    """Descriptors for standard input, output and error."""
    affinity: Sequence[int]
    """Processors on which it may run."""
    umask: int
    ignored: Sequence[int]
    """Signals that it ignores, as a new process inherits them."""


def python_program(command: Sequence[str], env: Mapping[str, str], cwd: str) -> Program | str:
    """What a command runs, if this interpreter runs it; otherwise why not."""
    words = list(command)
    if not Path(cwd).is_dir():
        return f"{cwd} is not a folder"
    if script := _script_of_this_python(words[0], env, cwd):
        return Program(kind="path", what=script, argv=tuple(words[1:]))
    if not _is_this_python(words.pop(0), env, cwd):
        return f"{command[0]} is not {sys.executable}, nor a script of it"
    given = {"unbuffered": False, "safe_path": False}
    while words and words[0] in ("-u", "-P"):
        given["unbuffered" if words.pop(0) == "-u" else "safe_path"] = True
    if len(words) > 1 and words[0] in ("-m", "-c"):
        return Program(kind="module" if words[0] == "-m" else "code", what=words[1],
                       argv=tuple(words[2:]), **given)
    if not words or words[0].startswith("-"):
        return f"the preloaded process knows no option {' '.join(words[:1]) or 'to be interactive'}"
    if not Path(cwd, words[0]).is_file():
        return f"{words[0]} is not a file"
    return Program(kind="path", what=words[0], argv=tuple(words[1:]), **given)


def _find(word: str, env: Mapping[str, str], cwd: str) -> str | None:
    """The path of a program, as a shell finds it."""
    return os.path.join(cwd, word) if "/" in word else shutil.which(word, path=env.get("PATH"))


def _is_this_python(word: str, env: Mapping[str, str], cwd: str) -> bool:
    """Whether it is this interpreter, of this environment, by whichever of its names."""
    found, own = _find(word, env, cwd), sys.executable
    with suppress(OSError):
        return found is not None and os.path.samefile(found, own) and os.path.samefile(
            os.path.dirname(found), os.path.dirname(own))
    return False


def _script_of_this_python(word: str, env: Mapping[str, str], cwd: str) -> str | None:
    """The path of an executable script whose first line names this interpreter."""
    found = _find(word, env, cwd)
    if found is None or not os.access(found, os.X_OK):
        return None
    with suppress(OSError), open(found, "rb") as file:
        first = file.read(_SHEBANG_BYTES).partition(b"\n")[0].decode(errors="replace")
        if first.startswith("#!") and _is_this_python(first[2:].strip(), env, cwd):
            return found if "/" not in word else word
    return None


def become(start: Start, parent: int) -> None:
    """Be, from here on, as a new process that was started so. In the child."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(128 + signal.SIGKILL)
    _forked[:] = [os.getpid()]
    _set_streams(start)
    os.environ.clear()
    os.environ.update(start.env)
    time.tzset()
    tempfile.tempdir = None
    os.umask(start.umask)
    os.sched_setaffinity(0, start.affinity)
    for number in start.ignored:
        signal.signal(number, signal.SIG_IGN)
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    os.chdir(start.cwd)
    words = [sys.executable, *_words(start.program)]
    sys.orig_argv[:] = words
    sys.argv[:] = [_argv_0(start.program), *start.program.argv]
    _show_in_proc(words, start.env)


def _set_streams(start: Start) -> None:
    """Put the descriptors in their places; Python's own objects for them stay."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for number, descriptor in enumerate(start.streams):
        os.dup2(descriptor, number)
    for descriptor in start.streams:
        os.close(descriptor)
    unbuffered = start.program.unbuffered or bool(start.env.get("PYTHONUNBUFFERED"))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(  # type: ignore[union-attr]
            line_buffering=not unbuffered and (stream is sys.stderr or stream.isatty()),
            write_through=unbuffered)


def _words(program: Program) -> list[str]:
    flag = {"path": [], "module": ["-m"], "code": ["-c"]}[program.kind]
    return [*flag, program.what, *program.argv]


def _argv_0(program: Program) -> str:
    return {"path": program.what, "module": "-m", "code": "-c"}[program.kind]


def _show_in_proc(words: Sequence[str], env: Mapping[str, str]) -> None:
    """Let `/proc/PID/cmdline` and `environ`, and so `ps` and `pkill`, show this program.

    By PR_SET_MM_MAP of prctl(2), which needs no privilege; nothing happens where the kernel was
    built without it.
    """
    parts = [b"".join(os.fsencode(word) + b"\0" for word in words),
             b"".join(os.fsencode(f"{k}={v}") + b"\0" for k, v in env.items())]
    # The kernel shows private memory only.
    memory = mmap.mmap(-1, max(1, sum(map(len, parts))),
                       flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(b"".join(parts))
    _shown.append(memory)
    at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    libc = ctypes.CDLL(None)
    libc.sbrk.restype = ctypes.c_void_p

    def field(number: int) -> int:
        """A field of proc_pid_stat(5), by its number there."""
        return int(fields[number - 3])

    end = at + len(parts[0])
    struct = (ctypes.c_uint64 * 13)(
        field(26), field(27), field(45), field(46), field(47), libc.sbrk(0), field(28),
        at, end, end, end + len(parts[1]), 0, 0xFFFFFFFF << 32)
    libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(struct), ctypes.sizeof(struct), 0)


def run(program: Program) -> None:
    """Run the program as `python` would; errors and exits come out of here as they are."""
    sys.modules["__main__"] = main = ModuleType("__main__")
    if program.kind == "code":
        _add_to_path(program, "")
        exec(compile(program.what, "<string>", "exec"), main.__dict__)  # noqa: S102
    elif program.kind == "module":
        _add_to_path(program, os.getcwd())
        if importlib.util.find_spec(program.what.partition(".")[0]) is None:
            sys.exit(f"{sys.executable}: No module named {program.what}")
        runpy.run_module(program.what, run_name="__main__", alter_sys=True)
    else:
        _add_to_path(program, os.path.dirname(os.path.realpath(program.what)))
        path = os.path.join(os.getcwd(), program.what)
        main.__dict__.update(__file__=path, __loader__=SourceFileLoader("__main__", path))
        exec(compile(Path(path).read_bytes(), path, "exec"), main.__dict__)  # noqa: S102


def _add_to_path(program: Program, folder: str) -> None:
    if not program.safe_path and not os.environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, folder)
