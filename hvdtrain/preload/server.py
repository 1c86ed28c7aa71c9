"""Program: imports modules, runs nothing of them, and forks programs from itself.

It takes requests from a listening Unix socket of its owner (`client.py` has the protocol), of the
same user and the same namespaces only, and ends when its standard input does. It refuses to fork,
and says why, where a child would not be what a new process is: something of TensorFlow, MPI or a
GPU was used, threads were started after the imports, or what counts at import differs.

One thread, no locks: a fork copies the process as it stands between two requests.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import re
import selectors
import signal
import socket
import struct
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain.preload.child import Program, Start, become, python_program, run

DEFAULT_MODULES = ("tensorflow", "keras", "horovod.tensorflow", "h5py", "hvdtrain.cli.main",
                   "hvdtrain.run", "hvdtrain.session", "hvdtrain.train.fit",
                   "hvdtrain.train.devices", "hvdtrain.collectives.horovod")
"""What a rank of `hvdtrain fit` imports."""

# Nothing is imported from the working directory: its folder is taken off the path first.
_BOOT = ("import sys; del sys.path[0]; from hvdtrain.preload.server import main; main()")

_COUNT_AT_IMPORT = re.compile(
    r"(TF_(?!CONFIG$)|KERAS_|XLA_|OMP_|KMP_|MKL_|OPENBLAS_|GOTO_|LD_|MALLOC_|GLIBC_"
    r"|PYTHON(?!UNBUFFERED$)|LC_)|(HOME|LANG|LANGUAGE)$")
_LOG_LEVEL = {"TF_CPP_MIN_LOG_LEVEL": "2"}
"""As `hvdtrain fit` sets it where it is not set."""
_SAME_FOR_CHILDREN = ("net", "mnt", "ipc", "uts", "user", "cgroup")
_GPU_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
_REQUEST_LIMIT_BYTES = 1 << 24
_CHUNK = 65536
_STREAMS = ("input", "output", "error")
_CREDENTIALS = struct.Struct("3i")


def server_command(modules: Sequence[str] = DEFAULT_MODULES,
                   python: str = sys.executable) -> list[str]:
    """The words that start this program, for `client.Preloader`.

    Args:
        modules: Names of what it imports; those that are not installed are left out.
        python: String, the interpreter; programs of others are refused.
    """
    return [python, "-c", _BOOT, *modules]


@dataclass(eq=False)
class _Client:
    """One connection: a request that is read, then a child that runs."""

    connection: socket.socket
    data: bytes = b""
    streams: list[int] = field(default_factory=list)
    child: int = 0
    pidfd: int = -1


class Server:
    """Serves requests.

    Args:
        listener: Where clients connect.
        owner: Integer, a descriptor that ends when the owner does.
    """

    def __init__(self, listener: socket.socket, owner: int) -> None:
        self._listener, self._owner = listener, owner
        self._selector = selectors.DefaultSelector()
        self._clients: set[_Client] = set()
        self._environ = self._environ_after = _counting(os.environ)
        self._threads: set[str] = set()
        self._unsafe = ""

    def load(self, modules: Sequence[str]) -> None:
        """Import; what is not installed is left out."""
        os.environ.update(_counting(os.environ))
        with _quiet():
            for name in modules:
                try:
                    importlib.import_module(name)
                except ModuleNotFoundError as error:
                    if (error.name or name).partition(".")[0] != name.partition(".")[0]:
                        raise
        # Libraries set some for themselves; who has imported them before hands these on.
        self._environ_after = _counting(os.environ)
        gc.collect()
        gc.freeze()  # the collector of a child would copy every page
        self._threads = set(os.listdir("/proc/self/task"))
        self._unsafe = why_not_to_fork()

    def serve(self) -> Start | None:
        """Fork for each request.

        Returns:
            In every child what it is to run; in this process, when the owner has gone, None.
        """
        self._watch(self._listener, self._accept)
        self._watch(self._owner, lambda: None)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj == self._owner:
                    self._end_all()
                    return None
                if key.fd not in self._selector.get_map():
                    continue  # an earlier event has closed it
                start = key.data()
                if start is not None:
                    return start  # type: ignore[no-any-return]

    def _watch(self, what: socket.socket | int, action: Callable[[], Start | None]) -> None:
        self._selector.register(what, selectors.EVENT_READ, action)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        client = _Client(connection)
        self._clients.add(client)
        if why := _stranger(connection):
            self._refuse(client, why)
            return
        self._watch(connection, lambda: self._read(client))

    def _read(self, client: _Client) -> Start | None:
        try:
            data, streams, _, _ = socket.recv_fds(client.connection, _CHUNK, len(_STREAMS))
        except ConnectionError:
            data, streams = b"", []
        client.streams += streams
        client.data += data
        if not data or client.child or len(client.data) > _REQUEST_LIMIT_BYTES:
            self._drop(client)  # it has let go of its child, if there is one
        elif client.data.endswith(b"\n"):
            return self._answer(client)
        return None

    def _answer(self, client: _Client) -> Start | None:
        try:
            start = self._parse(json.loads(client.data), tuple(client.streams))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            start = f"that is not a request ({type(error).__name__}: {error})"
        if isinstance(start, str):
            self._refuse(client, start)
            return None
        return self._fork(client, start)

    def _parse(self, request: dict[str, Any], streams: tuple[int, ...]) -> Start | str:
        """What is to be started, or why it cannot be."""
        if len(streams) != len(_STREAMS):
            raise ValueError(f"it has {len(streams)} descriptors for {', '.join(_STREAMS)}")
        program = python_program(request["command"], request["env"], request["cwd"])
        why = self._why_not(request["env"])
        if why or isinstance(program, str):
            return why or str(program)
        return Start(program=program, streams=streams, env=request["env"], cwd=request["cwd"],
                     affinity=request["affinity"], umask=request["umask"],
                     ignored=request["ignored"])

    def _why_not(self, environ: Mapping[str, str]) -> str:
        theirs = _counting(environ)
        others = [name for name in sorted({*theirs, *self._environ}) if theirs.get(name) not in (
            self._environ.get(name), self._environ_after.get(name))]
        if others:
            name = others[0]
            return (f"{name} counts when modules are imported, and it is "
                    f"{_shown(theirs.get(name))} here but was {_shown(self._environ.get(name))} "
                    "when the preloaded process began")
        if set(os.listdir("/proc/self/task")) != self._threads:
            return "the preloaded process has started threads since it imported its modules"
        return self._unsafe

    def _fork(self, client: _Client, start: Start) -> Start | None:
        parent = os.getpid()
        with warnings.catch_warnings():
            # Python warns of threads; those of the imports hold no locks while they wait.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if not child:
            self._forget(client)
            become(start, parent)
            return start
        client.child, client.pidfd = child, os.pidfd_open(child)
        self._close_streams(client)
        self._watch(client.pidfd, lambda: self._ended(client))
        self._tell(client, {"pid": child})
        return None

    def _forget(self, own: _Client) -> None:
        """In a child: close what is the parent's; `become` puts its own streams in their places."""
        self._selector.close()
        self._listener.close()
        for client in self._clients:
            client.connection.close()
            if client.pidfd >= 0:
                os.close(client.pidfd)
            if client is not own:
                self._close_streams(client)

    def _ended(self, client: _Client) -> None:
        self._selector.unregister(client.pidfd)
        ended = os.waitid(os.P_PID, client.child, os.WEXITED | os.WNOWAIT)
        if ended is None:
            raise RuntimeError("a descriptor of a process tells its end before it is there")
        killed = ended.si_code != os.CLD_EXITED
        self._tell(client, {"code": -ended.si_status if killed else ended.si_status})

    def _tell(self, client: _Client, message: dict[str, Any]) -> None:
        with suppress(OSError):  # it has gone, which reading tells
            client.connection.sendall(json.dumps(message).encode() + b"\n")

    def _refuse(self, client: _Client, why: str) -> None:
        self._tell(client, {"refused": why})
        self._drop(client)

    def _drop(self, client: _Client) -> None:
        """The client has gone, or has heard the end."""
        if client.connection in self._selector.get_map():
            self._selector.unregister(client.connection)
        client.connection.close()
        self._close_streams(client)
        self._clients.discard(client)
        if client.child:
            self._reap(client)

    def _reap(self, client: _Client) -> None:
        if client.pidfd in self._selector.get_map():  # it still runs
            self._selector.unregister(client.pidfd)
            _kill_group(client.child)
        os.close(client.pidfd)
        os.waitpid(client.child, 0)

    @staticmethod
    def _close_streams(client: _Client) -> None:
        for descriptor in client.streams:
            os.close(descriptor)
        client.streams.clear()

    def _end_all(self) -> None:
        for client in list(self._clients):
            self._drop(client)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep back what is written to standard error, unless something fails."""
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        except BaseException:
            file.seek(0)
            os.write(kept, file.read())
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def _kill_group(child: int) -> None:
    """Kill a child, and its group if it leads one by now."""
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)


def _stranger(connection: socket.socket) -> str:
    """Why a client may not start programs here; "" where it may."""
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if uid != os.geteuid():
        return f"the preloaded process belongs to user {os.geteuid()}, this one to {uid}"
    try:
        for name in _SAME_FOR_CHILDREN:
            if os.readlink(f"/proc/{pid}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}"):
                return f"the preloaded process is in another {name} namespace"
        if Path(f"/proc/{pid}/cgroup").read_text() != Path("/proc/self/cgroup").read_text():
            return "the preloaded process is in another control group"
    except OSError as error:
        return f"the preloaded process cannot see where its client runs ({error})"
    return ""


def why_not_to_fork() -> str:
    """Why this process is not as one that has only imported; "" where it is."""
    context = getattr(sys.modules.get("tensorflow.python.eager.context"), "_context", None)
    if getattr(context, "_context_handle", None) is not None:
        return "TensorFlow has run something in the preloaded process"
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith(_GPU_FILES):
                return "a GPU is in use in the preloaded process"
    return "MPI is initialized in the preloaded process" if _mpi_is_initialized() else ""


def _mpi_is_initialized() -> bool:
    libraries = set(re.findall(r"/\S*/libmpi\.so\S*", Path("/proc/self/maps").read_text()))
    for path in libraries:
        flag = ctypes.c_int(0)
        ctypes.CDLL(path).MPI_Initialized(ctypes.byref(flag))
        if flag.value:
            return True
    return False


def _counting(environ: Mapping[str, str]) -> dict[str, str]:
    return _LOG_LEVEL | {k: v for k, v in environ.items() if _COUNT_AT_IMPORT.match(k)}


def _shown(value: str | None) -> str:
    return "not set" if value is None else repr(value)


def main() -> None:
    """Serve until the owner ends; in a child, run its program."""
    *modules, descriptor = sys.argv[1:]
    listener = socket.socket(fileno=int(descriptor))
    path = Path(listener.getsockname())
    owned_by = os.getpid()
    try:
        server = Server(listener, 0)
        server.load(modules)
        start = server.serve()
    finally:
        if os.getpid() == owned_by:
            with suppress(OSError):  # the owner does the same, if it can
                path.unlink(missing_ok=True)
                path.parent.rmdir()
    del server, listener
    if start is not None:
        program: Program = start.program
        del start
        run(program)


if __name__ == "__main__":
    main()
