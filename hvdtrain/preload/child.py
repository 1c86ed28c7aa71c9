"""Makes a fork of the preloaded process equal to a new process, and runs its program."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from hvdtrain.preload.client import RefusedError
from hvdtrain.program import folder_of, run_program

_PR_SET_PDEATHSIG = 1
_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_SHEBANG_BYTES = 256

_forked: list[int] = []
_shown: list[mmap.mmap] = []  # what `/proc` shows of this process; must stay in memory


def is_forked() -> bool:
    """Whether this process is a fork of a preloaded one, whose memory it shares."""
    return os.getpid() in _forked


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a child gets: `python OPTIONS FLAG WHAT ARGV`, and its surroundings.

    `flag` is `-m`, `-c`, or empty for a script; `options` are `-u` and `-P`. `streams` are
    descriptors, `affinity` processors, `ignored` signals.
    """

    options: Sequence[str]
    flag: str
    what: str
    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    streams: Sequence[int]
    affinity: Sequence[int]
    umask: int
    ignored: Sequence[int]


def start_of(command: Sequence[str], env: Mapping[str, str], cwd: str, **more: Any) -> Start:
    """What a child gets for a command; RefusedError if this interpreter does not run it."""
    if not Path(cwd).is_dir():
        raise RefusedError(f"{cwd} is not a folder")
    name, *words = command
    found = os.path.join(cwd, name) if "/" in name else shutil.which(name, path=env.get("PATH"))
    if found is not None and _is_script_of_this_python(found):
        words.insert(0, name if "/" in name else found)
    elif found is None or not _is_this_python(found):
        raise RefusedError(f"{name} is not {sys.executable}, nor a script of it")
    options = list(takewhile(lambda word: word in ("-u", "-P"), words))
    flag, *words = [*words[len(options):], ""]
    if flag not in ("-m", "-c") or len(words) == 1:
        if not flag or flag.startswith("-"):
            raise RefusedError(
                f"the preloaded process knows no option {flag or 'to be interactive'}")
        if not Path(cwd, flag).is_file():
            raise RefusedError(f"{flag} is not a file")
        flag, words = "", [flag, *words]
    return Start(options=options, flag=flag, what=words[0], argv=words[1:-1], env=env, cwd=cwd,
                 **more)


def _is_this_python(path: str) -> bool:
    """Whether it is this interpreter, of this environment, by any of its names."""
    with suppress(OSError):
        return os.path.samefile(path, sys.executable) and os.path.samefile(
            os.path.dirname(path), os.path.dirname(sys.executable))
    return False


def _is_script_of_this_python(path: str) -> bool:
    """Whether it is an executable script whose first line names this interpreter."""
    with suppress(OSError), open(path, "rb") as file:
        first = file.read(_SHEBANG_BYTES).partition(b"\n")[0].decode(errors="replace")
        return (first.startswith("#!") and os.access(path, os.X_OK)
                and _is_this_python(first[2:].strip()))
    return False


def become(start: Start, parent: int) -> None:
    """Make this child like a new process that was started so."""
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
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    os.chdir(start.cwd)
    words = [sys.executable, *filter(None, [start.flag]), start.what, *start.argv]
    sys.orig_argv[:] = words
    _show_in_proc(words, start.env)


def _set_streams(start: Start) -> None:
    """Put the descriptors in place; Python's own objects for them stay."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for number, descriptor in enumerate(start.streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    unbuffered = "-u" in start.options or bool(start.env.get("PYTHONUNBUFFERED"))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(  # type: ignore[union-attr]
            line_buffering=not unbuffered and (stream is sys.stderr or stream.isatty()),
            write_through=unbuffered)


def _show_in_proc(words: Sequence[str], env: Mapping[str, str]) -> None:
    """Let `/proc/PID/cmdline` and `environ`, and so `ps` and `pkill`, show this program.

    By PR_SET_MM_MAP of prctl(2), which needs no privilege, if the kernel has it.
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
    end = at + len(parts[0])
    struct = (ctypes.c_uint64 * 13)(
        *(int(fields[number - 3]) for number in (26, 27, 45, 46, 47)),  # as in proc_pid_stat(5)
        libc.sbrk(0), int(fields[28 - 3]), at, end, end, end + len(parts[1]), 0, 0xFFFFFFFF << 32)
    libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(struct), ctypes.sizeof(struct), 0)


def run(start: Start) -> None:
    """Run the program as `python` would; errors and exits pass through."""
    if "-P" not in start.options and not os.environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, folder_of(start.flag, start.what))
    run_program(start.flag, start.what, start.argv)
