"""`notebook_launcher`: runs a function of a notebook on several ranks of this host."""

from __future__ import annotations

import linecache
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hvdtrain.errors import EXIT_RUN_FAILED, EXIT_TIME_OVER, ConfigError, RunFailedError
from hvdtrain.launch.execute import launch_native
from hvdtrain.launch.facts import gather_facts
from hvdtrain.launch.options import LaunchOptions
from hvdtrain.launch.output import RankOutput
from hvdtrain.launch.plan import make_plan
from hvdtrain.launch.running_job import JobEnd, asked_for_input
from hvdtrain.notebook.call import CallFolder
from hvdtrain.preload.client import SOCKET_VARIABLE, ForkedProgram, Preloader, RefusedError
from hvdtrain.preload.server import server_command

_GRACE_S = 5.0  # until silent ranks are killed: someone waits for the prompt
_PROBE_S = 10.0

_kept: list[Preloader] = []  # the preloaded process, if any


def notebook_launcher(function: Callable[..., Any], args: tuple[Any, ...] | list[Any] = (),
                      kwargs: Mapping[str, Any] | None = None, *, np: int = 2,
                      env: Mapping[str, str] | None = None, timeout_s: float | None = None,
                      verbose: bool = False, preload: bool = True) -> Any:
    """Run a function on several ranks of this host, from a notebook or any Python process.

    The ranks are new processes. The function may be defined in a cell; it is sent with the
    variables, functions and classes that it uses, as they are now. In it call `hvdtrain.init()` and
    train, as in a script. The output of rank 0 is shown as it comes. An interrupt ends all ranks.

    Args:
        function: Callable, what each rank calls.
        args: Tuple of its arguments.
        kwargs: Its keyword arguments.
        np: Integer, the number of ranks. Defaults to 2.
        env: Variables for the ranks, in addition to those of this process.
        timeout_s: Float, a limit for the whole run. Defaults to none.
        verbose: Boolean, whether to show the output of the other ranks too, not only if they fail.
        preload: Boolean, whether to keep a process with TensorFlow until this one ends, and fork
            the ranks from it, so that later calls start at once. Defaults to True.

    Returns:
        What the function returns on rank 0.

    Example:
        ```python
        def train(epochs):
            hvdtrain.init()
            ...
            return history.history

        history = hvdtrain.notebook_launcher(train, (3,), np=2)
        ```

    Raises:
        ConfigError: `function` or `args` is not one, or an option is out of range.
        LaunchError: The function, or something that it uses, cannot be sent to other processes.
        RunFailedError: A rank failed; the message has its traceback.
    """
    if not callable(function):
        raise ConfigError(
            f"notebook_launcher takes a function. Received: {function!r}. Give the function "
            "itself, without calling it: hvdtrain.notebook_launcher(train, np=2).")
    if not isinstance(args, (tuple, list)):
        raise ConfigError(f"args is {args!r}. Expected a tuple, as ({args!r},) for one argument.")
    if np < 1:
        raise ConfigError(f"np is {np}. Expected 1 rank or more.")
    call = (function, tuple(args), dict(kwargs or {}))
    with tempfile.TemporaryDirectory(prefix="hvdtrain-call-") as path:
        folder, sources = CallFolder(Path(path)), _sources()
        options = LaunchOptions(
            command=(sys.executable, "-m", "hvdtrain.notebook.rank", str(folder.path)), np=np,
            hosts=f"localhost:{np}", starter="native",
            env=tuple(f"{name}={value}" for name, value in (env or {}).items()),
            timeout_s=timeout_s, grace_s=_GRACE_S, verbose=verbose)
        plan = make_plan(options, os.environ, gather_facts())
        folder.write_call(call, sources)
        if preload and SOCKET_VARIABLE not in os.environ:
            socket = _preloaded({**os.environ, **plan.env})
            plan = replace(plan, preload=True, env={**plan.env, SOCKET_VARIABLE: socket})
        output = RankOutput(np, out=sys.stdout, err=sys.stderr, verbose=verbose, live=True)
        end = launch_native(plan, output)
        if end.signal:
            signal.raise_signal(end.signal)  # as if it had come now: KeyboardInterrupt
        _check(end, folder, sources, timeout_s)
        return folder.read_result()


def _sources() -> dict[str, str]:
    """Code without a file: cells, and typed text."""
    return {name: "".join(entry[2]) for name, entry in list(linecache.cache.items())
            if len(entry) == 4 and entry[1] is None and not os.path.exists(name)}


def _preloaded(env: Mapping[str, str]) -> str:
    """The socket of a preloaded process that accepts this environment."""
    if _kept:
        code: int | None = None
        with suppress(RefusedError, subprocess.TimeoutExpired):
            nowhere = subprocess.DEVNULL
            probe = ForkedProgram(_kept[0].path, [sys.executable, "-c", ""], env=env,
                                  stdin=nowhere, stdout=nowhere, stderr=nowhere)
            probe.begin()
            code = probe.wait(_PROBE_S)
        if code != 0:
            _kept.pop().close()
    if not _kept:
        _kept.append(Preloader(server_command(), env))
    return _kept[0].path


def _check(end: JobEnd, folder: CallFolder, sources: Mapping[str, str],
           timeout_s: float | None) -> None:
    if end.code == 0 and folder.has_result():
        return
    if end.cause is None:
        if end.code == EXIT_TIME_OVER:
            raise RunFailedError(f"The ranks were ended: the limit of {timeout_s:g} s is over.",
                                 code=end.code)
        why = " ".join(end.report) or ("Rank 0 has ended without returning from the function "
                                       "(sys.exit). Return from it instead.")
        raise RunFailedError(why, code=end.code or EXIT_RUN_FAILED, rank=0)
    rank, lines = end.cause.rank, list(end.report)
    text = _with_cells(folder.read_failure(rank), sources)
    if text:
        lines += ["", f"Rank {rank}:", text]
    if asked_for_input(end.cause):
        lines += ["", "Ranks have no standard input. To debug the function, call it in this "
                  "process, as one rank."]
    raise RunFailedError("\n".join(lines), code=end.code, rank=rank, traceback=text)


def _with_cells(text: str, sources: Mapping[str, str]) -> str:
    """A traceback with the numbers of cells, as the notebook shows them."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is not None:
        for name in sources:
            label = shell.compile.format_code_name(name)
            if label is not None:
                text = text.replace(f'File "{name}"', " ".join(label))
    return text
