"""Program: imports modules, runs nothing of them, and forks programs from itself.

It takes requests on its owner's Unix socket (protocol in `client.py`), of the same user and
namespaces only, and ends with its standard input. It refuses to fork, with the reason, where a
child would differ from a new process: TensorFlow, MPI or a GPU was used, threads were started after
the imports, or what counts at import differs. It has one thread and no locks, since a fork copies
the process as it is between two requests.
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
from typing import Any, cast

from hvdtrain.preload.child import Start, become, run, start_of
from hvdtrain.preload.client import RefusedError

DEFAULT_MODULES = ("tensorflow", "keras", "horovod.tensorflow", "h5py", "hvdtrain.cli.main",
                   "hvdtrain.session", "hvdtrain.train.fit",
                   "hvdtrain.train.devices", "hvdtrain.collectives.horovod")
"""What a rank of `hvdtrain fit` imports."""

# Nothing is imported from the working directory: its folder is taken off the path first.
_BOOT = ("import sys; del sys.path[0]; from hvdtrain.preload.server import main; main()")

_COUNT_AT_IMPORT = re.compile(
    r"(TF_(?!CONFIG$)|KERAS_|XLA_|OMP_|KMP_|MKL_|OPENBLAS_|GOTO_|LD_|MALLOC_|GLIBC_"
    r"|PYTHON(?!UNBUFFERED$)|LC_)|(HOME|LANG|LANGUAGE)$")
_LOG_LEVEL = {"TF_CPP_MIN_LOG_LEVEL": "2"}  # as `hvdtrain fit` sets it by default
_SAME_FOR_CHILDREN = ("net", "mnt", "ipc", "uts", "user", "cgroup")
_GPU_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
_REQUEST_LIMIT_BYTES = 1 << 24
_CHUNK = 65536
_STREAMS = ("input", "output", "error")
_CREDENTIALS = struct.Struct("3i")


def server_command(modules: Sequence[str] = DEFAULT_MODULES,
                   python: str = sys.executable) -> list[str]:
    """The command of this program for `client.Preloader`; skips modules that are not installed."""
    return [python, "-c", _BOOT, *modules]


@dataclass(eq=False)
class _Client:
    """One connection: a request that is read, then a child that runs."""

    connection: socket.socket
    data: bytes = b""
    streams: list[int] = field(default_factory=list)
    child: int = 0
    pidfd: int = -1

    def tell(self, message: dict[str, Any]) -> None:
        with suppress(OSError):  # it is gone; reading shows that
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def close_streams(self) -> None:
        for descriptor in self.streams:
            os.close(descriptor)
        self.streams.clear()


class PreloadServer:
    """Serves requests to `listener`, until `owner`, a descriptor, ends."""

    def __init__(self, listener: socket.socket, owner: int) -> None:
        self._listener, self._owner = listener, owner
        self._selector = selectors.DefaultSelector()
        self._clients: set[_Client] = set()
        self._environ = self._environ_after = _counting(os.environ)

    def load(self, modules: Sequence[str]) -> None:
        """Import; modules that are not installed are left out."""
        os.environ.update(_counting(os.environ))
        with _quiet():
            for name in modules:
                try:
                    importlib.import_module(name)
                except ModuleNotFoundError as error:
                    if (error.name or name).partition(".")[0] != name.partition(".")[0]:
                        raise
        # Libraries set some themselves; a client that has imported them passes these on.
        self._environ_after = _counting(os.environ)
        gc.collect()
        gc.freeze()  # the collector of a child would copy every page
        self._threads = set(os.listdir("/proc/self/task"))
        self._unsafe = why_not_to_fork()

    def serve(self) -> Start | None:
        """Fork for each request. Returns in every child what it is to run, at the end None."""
        self._watch(self._listener, self._accept)
        self._watch(self._owner, lambda: None)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj == self._owner:
                    for client in list(self._clients):
                        self._drop(client)
                    return None
                # An earlier event may have closed it.
                if key.fd in self._selector.get_map() and (start := key.data()) is not None:
                    return cast(Start, start)

    def _watch(self, what: socket.socket | int, action: Callable[[], Start | None]) -> None:
        self._selector.register(what, selectors.EVENT_READ, action)

    def _accept(self) -> None:
        client = _Client(self._listener.accept()[0])
        self._clients.add(client)
        self._watch(client.connection, lambda: self._read(client))
        try:
            _check_client(client.connection)
        except RefusedError as why:
            self._refuse(client, why)

    def _read(self, client: _Client) -> Start | None:
        try:
            data, streams, _, _ = socket.recv_fds(client.connection, _CHUNK, len(_STREAMS))
        except ConnectionError:
            data, streams = b"", []
        client.streams += streams
        client.data += data
        if not data or client.child or len(client.data) > _REQUEST_LIMIT_BYTES:
            self._drop(client)  # it has abandoned its child, if there is one
        elif client.data.endswith(b"\n"):
            try:
                return self._fork(client, self._start_for(client))
            except RefusedError as why:
                self._refuse(client, why)
        return None

    def _start_for(self, client: _Client) -> Start:
        try:
            request, streams = json.loads(client.data), tuple(client.streams)
            if len(streams) != len(_STREAMS):
                raise ValueError(f"it has {len(streams)} descriptors for {', '.join(_STREAMS)}")
            self._check_environ(request["env"])
            return start_of(streams=streams, **request)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise RefusedError(f"that is not a request ({type(error).__name__}: {error})") from None

    def _check_environ(self, environ: Mapping[str, str]) -> None:
        theirs, own = _counting(environ), self._environ
        for name in sorted({*theirs, *own}):
            if theirs.get(name) not in (own.get(name), self._environ_after.get(name)):
                here, was = ("not set" if value is None else repr(value)
                             for value in (theirs.get(name), own.get(name)))
                raise RefusedError(f"{name} counts when modules are imported, and it is {here} "
                                   f"here but was {was} when the preloaded process began")
        if set(os.listdir("/proc/self/task")) - self._threads:  # one may have ended
            raise RefusedError(
                "the preloaded process has started threads since it imported its modules")
        if self._unsafe:
            raise RefusedError(self._unsafe)

    def _fork(self, client: _Client, start: Start) -> Start | None:
        parent = os.getpid()
        with warnings.catch_warnings():
            # Python warns of threads; those of the imports hold no locks while they wait.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if not child:
            # The parent's descriptors; `become` sets its own streams.
            self._selector.close()
            self._listener.close()
            for one in self._clients:
                one.connection.close()
                if one.pidfd >= 0:
                    os.close(one.pidfd)
                if one is not client:
                    one.close_streams()
            become(start, parent)
            return start
        client.child, client.pidfd = child, os.pidfd_open(child)
        client.close_streams()
        self._watch(client.pidfd, lambda: self._ended(client))
        client.tell({"pid": child})
        return None

    def _ended(self, client: _Client) -> None:
        self._selector.unregister(client.pidfd)
        ended: Any = os.waitid(os.P_PID, client.child, os.WEXITED | os.WNOWAIT)
        killed = ended.si_code != os.CLD_EXITED
        client.tell({"code": -ended.si_status if killed else ended.si_status})

    def _refuse(self, client: _Client, why: RefusedError) -> None:
        client.tell({"refused": str(why)})
        self._drop(client)

    def _drop(self, client: _Client) -> None:
        """The client is gone, or has received the end."""
        if client.connection in self._selector.get_map():
            self._selector.unregister(client.connection)
        client.connection.close()
        client.close_streams()
        self._clients.discard(client)
        if client.child:
            if client.pidfd in self._selector.get_map():  # it still runs
                self._selector.unregister(client.pidfd)
                for kill in (os.kill, os.killpg):  # and its group, if it leads one by now
                    with suppress(ProcessLookupError):
                        kill(client.child, signal.SIGKILL)
            os.close(client.pidfd)
            os.waitpid(client.child, 0)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide what is written to standard error, unless something fails."""
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


def _check_client(connection: socket.socket) -> None:
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if uid != os.geteuid():
        raise RefusedError(
            f"the preloaded process belongs to user {os.geteuid()}, this one to {uid}")
    try:
        for name in _SAME_FOR_CHILDREN:
            if os.readlink(f"/proc/{pid}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}"):
                raise RefusedError(f"the preloaded process is in another {name} namespace")
        if Path(f"/proc/{pid}/cgroup").read_text() != Path("/proc/self/cgroup").read_text():
            raise RefusedError("the preloaded process is in another control group")
    except OSError as error:
        raise RefusedError(
            f"the preloaded process cannot see where its client runs ({error})") from None


def why_not_to_fork() -> str:
    """Why this process differs from one that has only imported; "" if it does not."""
    context = getattr(sys.modules.get("tensorflow.python.eager.context"), "_context", None)
    if getattr(context, "_context_handle", None) is not None:
        return "TensorFlow has run something in the preloaded process"
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith(_GPU_FILES):
                return "a GPU is in use in the preloaded process"
    flag = ctypes.c_int(0)
    for path in set(re.findall(r"/\S*/libmpi\.so\S*", Path("/proc/self/maps").read_text())):
        if not flag.value:
            ctypes.CDLL(path).MPI_Initialized(ctypes.byref(flag))
    return "MPI is initialized in the preloaded process" if flag.value else ""


def _counting(environ: Mapping[str, str]) -> dict[str, str]:
    return _LOG_LEVEL | {k: v for k, v in environ.items() if _COUNT_AT_IMPORT.match(k)}


def main() -> None:
    """Serve until the owner ends; in a child, run its program."""
    *modules, descriptor = sys.argv[1:]
    listener = socket.socket(fileno=int(descriptor))
    path = Path(listener.getsockname())
    owned_by = os.getpid()
    try:
        server = PreloadServer(listener, 0)
        server.load(modules)
        start = server.serve()
    finally:
        if os.getpid() == owned_by:
            with suppress(OSError):  # the owner does the same, if it can
                path.unlink(missing_ok=True)
                path.parent.rmdir()
    del server, listener
    if start is not None:
        run(start)


if __name__ == "__main__":
    main()
