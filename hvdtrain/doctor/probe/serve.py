"""Answers the doctor's questions on this host, one line of JSON for each, until its input ends."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, is_dataclass
from typing import Any

from hvdtrain.doctor.probe.files import look_at_directory, sees
from hvdtrain.doctor.probe.libraries import look_at_cuda, look_at_mpi, try_loading
from hvdtrain.doctor.probe.machine import look_at_gpus, look_at_machine
from hvdtrain.doctor.probe.network import Listener, connect_all, look_at_network
from hvdtrain.doctor.probe.python import look_at_python
from hvdtrain.doctor.probe.slurm import look_at_slurm
from hvdtrain.horovod_check import check_horovod


def serve(mark: str) -> None:
    """Read requests from standard input and answer on standard output."""
    # The answers go where nothing else that runs here can write.
    out = os.dup(1)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    listeners: list[Listener] = []
    for line in sys.stdin:
        request = json.loads(line)
        # However the doctor ends, nothing of it stays here for longer.
        signal.alarm(request["limit_s"])
        answer = _answer(request, listeners)
        os.write(out, f"{mark}{json.dumps(answer)}\n".encode())
    os._exit(0)


def _answer(request: Mapping[str, Any], listeners: list[Listener]) -> dict[str, Any]:
    what = request["do"]
    if what == "clock":
        return {"time": time.time()}
    if what == "connect":
        return connect_all(request["targets"], request["token"])
    if what == "file":
        return {path: sees(path, request["token"]) for path in request["paths"]}
    listeners.append(Listener(request["token"]))
    return look(request, listeners[-1].port)


def look(request: Mapping[str, Any], port: int) -> dict[str, Any]:
    """All facts of this host; a part that cannot be looked at is named in `problems`."""
    login = dict(os.environ)
    os.environ.update(request["env"])
    problems: dict[str, str] = {}
    directory = _guard("directory", lambda: look_at_directory(request["directory"]), problems)
    if directory is not None and directory.exists:
        os.chdir(directory.path)
    python = _guard("python", lambda: look_at_python(os.environ), problems)
    parts: dict[str, Callable[[], Any]] = {
        "gpu": lambda: look_at_gpus(os.environ), "machine": look_at_machine,
        "slurm": lambda: look_at_slurm(os.environ),
        "network": lambda: look_at_network(login, request["peers"], port)}
    if python is not None:
        parts |= {
            "horovod": lambda: check_horovod(paths=python.path, ext_suffix=python.ext_suffix),
            "loading": lambda: try_loading(python), "mpi": lambda: look_at_mpi(python),
            "cuda": lambda: look_at_cuda(python)}
    with ThreadPoolExecutor() as pool:
        running = {name: pool.submit(part) for name, part in parts.items()}
        found = {name: _guard(name, future.result, problems) for name, future in running.items()}
    tensorflow, horovod = found.pop("loading", None) or (None, None)
    found |= {"python": python, "directory": directory, "tensorflow_load": tensorflow,
              "horovod_load": horovod}
    values = {name: asdict(value) if is_dataclass(value) and not isinstance(value, type) else None
              for name, value in found.items()}
    return {"hostname": os.uname().nodename, "problems": problems, **values}


def _guard(name: str, part: Callable[[], Any], problems: dict[str, str]) -> Any:
    """One odd thing on one host must not hide all others."""
    try:
        return part()
    except Exception as error:  # noqa: BLE001
        problems[name] = f"{type(error).__name__}: {error}"
        return None
