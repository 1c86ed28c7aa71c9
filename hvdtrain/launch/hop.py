"""Program: starts programs on one host for a launcher elsewhere: a knot in a tree of ssh.

Standard library only, and nothing of hvdtrain: `launch/tree.py` sends it through standard input. It
writes `HVDTRAIN-HOP`, then both sides send frames: the number of a program, a kind, a size, and so
many bytes. The launcher sends

- START with a command line as JSON, DATA for its standard input, END of that, KILL;
- ALIVE, since nothing for `LEASE_S` means that the launcher is gone, but not from PAUSED to
  RESUMED.

It gets OUT and ERR of a program, and EXIT with its code, which is the last.

If the launcher is gone, this program ends; the standard inputs of what it has started are closed by
that, which ends the agents and hops behind them.
"""

import contextlib
import json
import os
import selectors
import signal
import struct
import subprocess
from functools import partial
from typing import Any

MARK = b"HVDTRAIN-HOP\n"
HEAD = struct.Struct("!IBI")
START, DATA, END, KILL, ALIVE, PAUSED, RESUMED, OUT, ERR, EXIT = range(10)
LEASE_S = 12
_CHUNK = 65536
_EXIT_NOT_STARTED = 127  # as in `errors.py`, which is not on that host


class Program:
    """A program that was started, and what it has not read yet."""

    def __init__(self, command: list[str]) -> None:
        pipe = subprocess.PIPE
        self.process: Any = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe,
                                             bufsize=0, start_new_session=True)
        self.unread = b""
        self.ends = False  # its standard input, after what is unread
        streams: Any = self.process.stdin, self.process.stdout, self.process.stderr
        for stream in streams:
            os.set_blocking(stream.fileno(), False)

    def feed(self) -> bool:
        """Write what it takes; returns whether something is left."""
        stdin = self.process.stdin
        try:
            while self.unread:
                self.unread = self.unread[os.write(stdin.fileno(), self.unread):]
        except BlockingIOError:
            return True
        except OSError:  # it reads no more
            self.unread = b""
        if self.ends:
            stdin.close()
        return False


class Hop:
    """Serves one launcher."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._programs: dict[int, Program] = {}
        self._received, self._paused = b"", False

    def run(self) -> None:
        """Until the launcher is gone."""
        self._selector.register(0, selectors.EVENT_READ, self._read)
        while True:
            for key, _ in self._selector.select():
                if key.fd in self._selector.get_map():  # an earlier event may have closed it
                    key.data()

    def _read(self) -> None:
        data = os.read(0, _CHUNK)
        if not data:
            os._exit(0)
        self._received += data
        if not self._paused:
            signal.alarm(LEASE_S)
        while len(self._received) >= HEAD.size:
            number, kind, size = HEAD.unpack_from(self._received)
            if len(self._received) < HEAD.size + size:
                return
            payload = self._received[HEAD.size:HEAD.size + size]
            self._received = self._received[HEAD.size + size:]
            self._take(number, kind, payload)

    def _take(self, number: int, kind: int, payload: bytes) -> None:
        program = self._programs.get(number)
        if kind in (PAUSED, RESUMED):
            self._paused = kind == PAUSED
            signal.alarm(0 if self._paused else LEASE_S)
        elif kind == START:
            self._start(number, json.loads(payload))
        elif program is not None and kind == KILL:
            program.process.kill()
        elif program is not None and not program.ends:
            program.unread += payload
            program.ends = kind == END
            if program.feed():
                with contextlib.suppress(KeyError):  # watched already
                    self._selector.register(program.process.stdin, selectors.EVENT_WRITE,
                                            partial(self._feed, program))

    def _start(self, number: int, command: list[str]) -> None:
        try:
            program = self._programs[number] = Program(command)
        except OSError as error:
            _send(number, ERR, f"{command[0]} cannot be started: {error}\n".encode())
            _send(number, EXIT, b"%d" % _EXIT_NOT_STARTED)
            return
        outputs = ((OUT, program.process.stdout), (ERR, program.process.stderr))
        for kind, stream in outputs:
            self._selector.register(stream, selectors.EVENT_READ,
                                    partial(self._forward, number, kind, stream))
        # Not their ends: a shared connection of ssh may hold them open.
        pidfd = os.pidfd_open(program.process.pid)
        self._selector.register(pidfd, selectors.EVENT_READ,
                                partial(self._ended, number, pidfd, outputs))

    def _feed(self, program: Program) -> None:
        stdin = program.process.stdin
        descriptor = stdin.fileno()
        if not program.feed():
            self._selector.unregister(descriptor)

    def _forward(self, number: int, kind: int, stream: Any) -> bool:
        """Pass on what can be read now; returns whether there was something."""
        data = b""
        with contextlib.suppress(BlockingIOError):
            data = os.read(stream.fileno(), _CHUNK)
            if data:
                _send(number, kind, data)
            else:
                self._unwatch(stream)
        return bool(data)

    def _ended(self, number: int, pidfd: int, outputs: Any) -> None:
        self._unwatch(pidfd)
        os.close(pidfd)
        program = self._programs.pop(number)
        for kind, stream in outputs:
            while self._forward(number, kind, stream):
                pass
            self._unwatch(stream)
            stream.close()
        stdin = program.process.stdin
        if not stdin.closed:
            self._unwatch(stdin)
            stdin.close()
        _send(number, EXIT, b"%d" % program.process.wait())

    def _unwatch(self, source: Any) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(source)


def _send(number: int, kind: int, payload: bytes) -> None:
    data = HEAD.pack(number, kind, len(payload)) + payload
    try:
        while data:
            data = data[os.write(1, data):]
    except OSError:  # the launcher is gone
        os._exit(0)


def main() -> None:
    """Serve one launcher."""
    # A scheduler signals every process of the job; the launcher decides what it means.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, frame: None)
    # In the handler, because the loop may be stuck in a write to a dead network.
    signal.signal(signal.SIGALRM, lambda number, frame: os._exit(0))
    signal.alarm(LEASE_S)
    os.write(1, MARK)
    Hop().run()


if __name__ == "__main__":
    main()
