"""Program: a stranger to a job, who tries to write to it, to flood it and to pose as a part of it.

    python -I -S stranger.py < COMMANDS

The first line of standard input is a `Target` as JSON. Each further line names one of `WAYS`; the
answer is a line of JSON: "" if it came to nothing, otherwise what was achieved. Sockets that a way
holds open are closed at the next one. Standard library only. Where it is started as root it
becomes the user nobody first.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NOBODY = 65534
ANSWER_S = 1.0
CODE = pickle.dumps({"offer": None})
HELD: list[socket.socket] = []
WAYS: dict[str, Callable[[Target], str]] = {}


class Target:
    """What a stranger can find out of a job: addresses, ports and processes.

    `needles` are the job's secrets, only to tell whether the stranger has come upon one.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self.address: str = values["address"]
        self.rendezvous: int = values["rendezvous"]
        self.watchdog: int = values["watchdog"]
        self.sources: list[str] = values["sources"]
        self.pids: list[int] = values["pids"]
        self.needles: list[str] = values["needles"]


def way(function: Callable[[Target], str]) -> Callable[[Target], str]:
    """One of `WAYS`, named by its function."""
    WAYS[function.__name__.replace("_", " ")] = function
    return function


def connect(target: Target, port: int, source: str) -> socket.socket:
    """A connection from one of the stranger's addresses."""
    return socket.create_connection((target.address, port), timeout=ANSWER_S,
                                    source_address=(source, 0))


def say(target: Target, port: int, source: str, data: bytes) -> bytes:
    """Send something and read all that comes; b"" where the connection is closed."""
    with contextlib.suppress(OSError), connect(target, port, source) as connection:
        with contextlib.suppress(OSError):  # closed while it is sent; an answer may be there
            connection.sendall(data)
        found = b""
        while data := connection.recv(65536):
            found += data
        return found
    return b""


def http(method: str, path: str, body: bytes = b"", length: object = None) -> bytes:
    """A request."""
    size = len(body) if length is None else length
    return f"{method} {path} HTTP/1.1\r\nContent-Length: {size}\r\n\r\n".encode() + body


def taken(answer: bytes) -> bool:
    """Whether a request was done."""
    return answer.partition(b"\r\n")[0].partition(b" ")[2].startswith(b"200")


def any_done(target: Target, *requests: bytes) -> str:
    """Whether one of some requests is done, from any address."""
    for source in target.sources:
        for request in requests:
            if taken(say(target, target.rendezvous, source, request)):
                return f"done from {source}: {request[:60]!r}"
    return ""


def guesses() -> Iterator[str]:
    """Prefixes of paths that a stranger may try."""
    yield ""
    for text in ("", "0", "hvdtrain", "0" * 32):
        yield f"/{hashlib.sha256(text.encode()).hexdigest()[:32]}"
    yield "/" + "0" * 32


@way
def put_an_address_for_gloo(target: Target) -> str:
    return any_done(target, *(http("PUT", f"{start}/global/{key}", b"x" * 136)
                              for start in guesses() for key in ("0", "1", "rank_0", "7")))


@way
def put_where_a_process_set_meets(target: Target) -> str:
    return any_done(target, http("PUT", "/global_process_set_hash_1/0", b"x"),
                    http("PUT", "/local_localhost/0", b"x"), http("PUT", "/cross_0/0", b"x"))


@way
def put_a_pickle_for_the_ranks(target: Target) -> str:
    return any_done(target, *(http("PUT", f"{start}/hvdtrain.{scope}", CODE)
                              for start in guesses() for scope in (
                                  "meet.start/0", "meet.start/go", "ps/done", "tf/address.0")))


@way
def put_a_value_sealed_with_a_guessed_key(target: Target) -> str:
    sealed = hmac.new(b"", b"hvdtrain.ps/done" + CODE, hashlib.sha256).hexdigest().encode() + CODE
    return any_done(target, *(http("PUT", f"{start}/hvdtrain.ps/done", sealed)
                              for start in guesses()))


@way
def read_what_the_ranks_have_put(target: Target) -> str:
    return any_done(target, *(http("GET", f"{start}/{path}") for start in guesses() for path in (
        "global/0", "global/rank_0", "hvdtrain.meet.start/0", "hvdtrain.test.0/gather.0.0",
        "hvdtrain/token")))


@way
def empty_a_scope(target: Target) -> str:
    return any_done(target, *(http("DELETE", f"{start}/global/{rank}")
                              for start in guesses() for rank in (0, 1)))


@way
def make_a_scope_of_its_own(target: Target) -> str:
    return any_done(target, *(http("PUT", f"/{scope}/x", b"x")
                              for scope in ("stranger", "..", "%2e%2e", "hvdtrain.stranger")))


@way
def send_a_body_of_64_megabytes(target: Target) -> str:
    return any_done(target, http("PUT", "/global/0", b"x" * (64 << 20)))


@way
def announce_a_body_and_send_none(target: Target) -> str:
    return any_done(target, *(http("PUT", "/global/0", b"x", length) for length in (
        1 << 40, -1, "0x10", "1e9", "")))


@way
def send_a_head_without_an_end(target: Target) -> str:
    return any_done(target, b"PUT /" + b"a" * (1 << 20),
                    b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 100_000)


@way
def hide_a_request_in_another(target: Target) -> str:
    inner = http("PUT", "/global/0", b"x")
    chunked = b"PUT /global/0 HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n"
    return any_done(target, http("GET", "/nothing/0", inner), http("GET", "/nothing/0") + inner,
                    chunked)


@way
def use_the_answer_about_identity_as_a_key(target: Target) -> str:
    for source in target.sources:
        answer = say(target, target.rendezvous, source,
                     http("GET", "/hvdtrain/identity/" + "0" * 32))
        with contextlib.suppress(ValueError, KeyError):
            mac = str(json.loads(answer.partition(b"\r\n\r\n")[2])["mac"])
            found = any_done(target, http("PUT", f"/{mac[:32]}/global/0", b"x"),
                             http("PUT", f"/{mac}/hvdtrain.ps/done", mac.encode() + CODE))
            if found:
                return found
    return ""


@way
def speak_another_language(target: Target) -> str:
    for port in (target.rendezvous, target.watchdog):
        for source in target.sources:
            for data in (b"\x16\x03\x01\x02\x00" * 1000, b"\0" * 9000, b"\r\n\r\n", b"{}\n" * 9000):
                say(target, port, source, data)
    return ""


@way
def hold_600_connections_to_the_rendezvous(target: Target) -> str:
    hold(target, target.rendezvous, 600)
    return ""


@way
def hold_600_connections_to_the_watchdog(target: Target) -> str:
    hold(target, target.watchdog, 600)
    return ""


def hold(target: Target, port: int, count: int) -> None:
    for number in range(count):
        with contextlib.suppress(OSError):
            HELD.append(connect(target, port, target.sources[number % len(target.sources)]))


@way
def open_3000_connections_one_after_the_other(target: Target) -> str:
    for number in range(3000):
        with contextlib.suppress(OSError):
            connect(target, (target.rendezvous, target.watchdog)[number % 2],
                    target.sources[number % len(target.sources)]).close()
    return ""


@way
def listen_in_place_of_the_rendezvous(target: Target) -> str:
    for address in ("", target.address):
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            with contextlib.suppress(OSError), socket.socket() as listener:
                listener.setsockopt(socket.SOL_SOCKET, option, 1)
                listener.bind((address, target.rendezvous))
                listener.listen()
                return f"listens at {address or 'all addresses'}"
    return ""


@way
def listen_beside_the_rendezvous(target: Target) -> str:
    """At its port, on another address: a rank that is led there would come."""
    # Another connection of the stranger's may have this port.
    with contextlib.suppress(OSError), socket.create_server(
            (target.sources[0], target.rendezvous)) as listener:
        listener.settimeout(1.0)
        return f"{listener.accept()[1]} came"
    return ""


@way
def say_to_the_watchdog_that_it_is_rank_1(target: Target) -> str:
    hellos = [{"token": "", "rank": 1}, {"token": "0" * 32, "rank": 1}, {"rank": 1, "mac": ""},
              {"rank": 1, "nonce": "0", "mac": hmac.new(b"", b"", hashlib.sha256).hexdigest()}]
    return believed(target, hellos)


@way
def tell_the_watchdog_that_rank_1_has_left(target: Target) -> str:
    verdict = {"kind": "lost", "causes": [1], "text": "a stranger says so"}
    return believed(target, [{"bye": True}, {"rank": 1, "bye": True}, {"verdict": verdict}])


def believed(target: Target, messages: list[dict[str, Any]]) -> str:
    for source in target.sources:
        for message in messages:
            answer = say(target, target.watchdog, source, json.dumps(message).encode() + b"\n")
            if b"alive" in answer or b"verdict" in answer:
                return f"{message} was answered: {answer[:80]!r}"
    return ""


@way
def answer_the_watchdog_with_its_own_nonce(target: Target) -> str:
    for source in target.sources:
        with contextlib.suppress(OSError, ValueError), connect(
                target, target.watchdog, source) as connection:
            nonce = json.loads(connection.recv(1000)).get("nonce", "")
            mac = hmac.new(nonce.encode(), b"member", hashlib.sha256).hexdigest()
            connection.sendall(json.dumps({"rank": 1, "nonce": nonce, "mac": mac}).encode() + b"\n")
            if b"alive" in connection.recv(1000):
                return f"was taken for rank 1 from {source}"
    return ""


@way
def send_the_watchdog_a_line_without_an_end(target: Target) -> str:
    for source in target.sources:
        say(target, target.watchdog, source, b"x" * (8 << 20))
    return ""


@way
def read_the_secret_on_command_lines(target: Target) -> str:
    return seen_in(target, [f"/proc/{pid}/cmdline" for pid in os.listdir("/proc") if pid.isdigit()])


@way
def read_the_secret_in_an_environment(target: Target) -> str:
    return seen_in(target, [f"/proc/{pid}/environ" for pid in target.pids])


@way
def read_the_secret_in_a_file(target: Target) -> str:
    files = [os.path.join(folder, name) for top in ("/tmp", "/dev/shm", "/run", "/var/tmp")  # noqa: S108
             for folder, _, names in os.walk(top) for name in names if "hvdtrain" in folder + name]
    return seen_in(target, files)


def seen_in(target: Target, paths: list[str]) -> str:
    for path in paths:
        with contextlib.suppress(OSError):
            if not Path(path).is_file() or Path(path).stat().st_size > 1 << 24:
                continue
            text = Path(path).read_bytes()
            if any(needle.encode() in text for needle in target.needles):
                return f"seen in {path}"
    return ""


@way
def signal_the_processes(target: Target) -> str:
    for pid in target.pids:
        with contextlib.suppress(PermissionError):
            os.kill(pid, signal.SIGURG)  # one that does no harm
            return f"process {pid} can be signalled"
    return ""


@way
def write_to_the_agent(target: Target) -> str:
    for pid in target.pids:
        for number in range(3):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/fd/{number}", "wb"):
                return f"descriptor {number} of process {pid} can be written to"
    return ""


def main() -> None:
    """Do what is asked for, one by one."""
    first = sys.stdin.readline()
    if not first:
        return
    target = Target(json.loads(first))
    "".encode("idna")  # what the sockets need of Python's files, which nobody may read
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    for line in sys.stdin:
        while HELD:
            HELD.pop().close()
        try:
            found = WAYS[line.strip()](target)
        except Exception as error:
            found = f"the stranger failed: {type(error).__name__}: {error}"
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
