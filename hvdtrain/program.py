"""Runs a Python program in this process as `python` does."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any


def run_program(flag: str, what: str, argv: Sequence[str]) -> dict[str, Any]:
    """Run it as `__main__`; errors and exits pass through.

    Args:
        flag: String, `-m` or `-c`, or empty for a script.
        what: String, a module's name, code, or a path.
        argv: Sequence of strings, what follows on the command line.

    Returns:
        The program's global names.
    """
    sys.argv[:] = [flag or what, *argv]
    sys.modules["__main__"] = main = ModuleType("__main__")
    main.__dict__.update(__annotations__={}, __builtins__=__builtins__)
    if flag == "-c":
        exec(compile(what, "<string>", "exec", dont_inherit=True), main.__dict__)  # noqa: S102
    elif flag == "-m":
        if importlib.util.find_spec(what.partition(".")[0]) is None:
            sys.exit(f"{sys.executable}: No module named {what}")
        return runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        path = os.path.join(os.getcwd(), what)
        main.__dict__.update(__file__=path, __cached__=None,
                             __loader__=SourceFileLoader("__main__", path))
        code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
        exec(code, main.__dict__)  # noqa: S102
    return main.__dict__


def folder_of(flag: str, what: str) -> str:
    """What `python` puts first into `sys.path` for a program."""
    return {"-c": "", "-m": os.getcwd()}.get(flag, os.path.dirname(os.path.realpath(what)))
