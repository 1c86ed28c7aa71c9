"""Program: answers the doctor's questions on a host, one line of JSON each, until input ends.

`probe_client.py` starts it with `python -m`, in the place and the way of a rank.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hvdtrain.doctor import look
from hvdtrain.doctor.facts import DirectoryFacts, NetworkFacts, ProbeFacts
from hvdtrain.horovod_check import check_horovod
from hvdtrain.launch.agent import look_at_network
from hvdtrain.process import ANSWER_MARK

_CONNECT_LIMIT_S = 5.0
_CODE = (".py", ".toml")
_MOST_FILES, _MOST_BYTES = 500, 1 << 20


def main() -> None:
    """Read requests from standard input and answer on standard output."""
    # Nothing else in this process can write to the stream of the answers.
    out = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for line in sys.stdin:
        request = json.loads(line)
        # However the doctor ends, the probe ends by then.
        signal.alarm(request["limit_s"])
        answer = _ANSWERS[request["do"]](request)
        os.write(out, f"{ANSWER_MARK}{json.dumps(answer)}\n".encode())
    os._exit(0)


def _look(request: Mapping[str, Any]) -> dict[str, Any]:
    """All facts; `problems` names the parts that cannot be looked at."""
    parts: dict[str, Callable[[], Any]] = {
        "directory": lambda: look_at_directory(Path(request["directory"])),
        "python": lambda: look.look_at_python(os.environ), "horovod": check_horovod,
        "loading": lambda: look.try_loading(sys.path), "mpi": look.look_at_mpi,
        "cuda": lambda: look.look_at_cuda(sys.path), "gpu": lambda: look.look_at_gpus(os.environ),
        "machine": look.look_at_machine, "slurm": lambda: look.look_at_slurm(os.environ),
        "network": lambda: NetworkFacts(**look_at_network(request["peers"]),
                                        port=_listen(request["token"]))}
    problems: dict[str, str] = {}
    found = {}
    with ThreadPoolExecutor() as pool:
        running = {name: pool.submit(part) for name, part in parts.items()}
        for name, future in running.items():
            try:
                found[name] = future.result()
            except Exception as error:  # noqa: BLE001 - one odd thing must not hide all others
                problems[name] = f"{type(error).__name__}: {error}"
    tensorflow, horovod = found.pop("loading", (None, None))
    return asdict(ProbeFacts(problems=problems, tensorflow_load=tensorflow, horovod_load=horovod,
                             **found))


def look_at_directory(folder: Path) -> DirectoryFacts:
    """Whether it exists, and a hash of the programs and job files in it."""
    if not folder.is_dir():
        return DirectoryFacts(path=str(folder), exists=False)
    files = [file for file in sorted(folder.iterdir())
             if file.suffix in _CODE and file.is_file() and file.stat().st_size <= _MOST_BYTES]
    files = files[:_MOST_FILES]
    return DirectoryFacts(path=str(folder), code_files=len(files),
                          code_hash=look.hash_of(files, folder) if files else "")


def _listen(token: str) -> int:
    """Answer on a free port with a token of this run, until the probe ends."""
    server = socket.create_server(("", 0), backlog=1024)

    def serve() -> None:
        while True:
            client, _ = server.accept()
            with client, suppress(OSError):
                client.sendall(token.encode())

    threading.Thread(target=serve, daemon=True).start()
    port: int = server.getsockname()[1]
    return port


def _connect_all(request: Mapping[str, Any]) -> dict[str, str]:
    """Connect to all targets at once; "" for one that answered, else the reason."""
    targets: Sequence[Mapping[str, Any]] = request["targets"]
    with ThreadPoolExecutor(max_workers=max(1, len(targets))) as pool:
        results = pool.map(lambda target: _connect(
            target["address"], target["port"], request["token"]), targets)
    return {target["host"]: result for target, result in zip(targets, results, strict=True)}


def _connect(address: str, port: int, token: str) -> str:
    try:
        with (socket.create_connection((address, port), timeout=_CONNECT_LIMIT_S) as connection,
              connection.makefile("rb") as stream):
            said = stream.read(len(token))
    except TimeoutError:
        return f"no answer from {address} in {_CONNECT_LIMIT_S:g} s"
    except OSError as error:
        return f"{address}: {os.strerror(error.errno) if error.errno else error}"
    return "" if said.decode(errors="replace") == token else f"{address} is answered by another"


def sees(file: Path, token: str) -> bool:
    """Whether the file is here with the content that was written elsewhere."""
    try:
        return file.read_text(encoding="utf-8") == token
    except OSError:
        return False


_ANSWERS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "clock": lambda _: time.time(), "facts": _look, "connect": _connect_all,
    "file": lambda request: sees(Path(request["file"]), request["token"])}

if __name__ == "__main__":
    main()
