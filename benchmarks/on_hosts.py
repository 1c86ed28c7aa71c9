"""Runs a program with one rank on each of some virtual hosts, whose links have a given speed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@contextmanager
def virtual_hosts(count: int, mbit: float) -> Iterator[object]:
    """A function that runs `hvdtrain launch ...` with one rank per host and shows its output.

    Its `slots` are other ranks on the hosts, as in `hosta:2,hostb:1`.

    Args:
        count: Integer, hosts.
        mbit: Float, what each link carries per second in each direction.
    """
    sys.path.insert(0, str(ROOT))
    from tests.cluster.hosts import VirtualHosts
    with VirtualHosts(count) as hosts:
        hosts.rate(f"{mbit:g}mbit")
        # A path of the first host, which has a /dev/shm of its own.
        hostfile = Path("/dev/shm") / f"hvdtrain-bench-{os.getpid()}"
        hosts.run("hosta", ["bash", "-c",
                            f"printf '%s slots=1\\n' {' '.join(hosts.names)} > {hostfile}"])

        def launch(words: Sequence[str], *, quiet: bool = False,
                   slots: str = "") -> list[str]:
            where = ["-H", slots] if slots else ["--hostfile", str(hostfile)]
            process = hosts.start(
                "hosta", [sys.executable, "-m", "hvdtrain", "launch", *where, *words], cwd=ROOT,
                env={"PYTHONPATH": str(ROOT)})
            said = []
            for line in process.stdout:
                said.append(line)
                if not quiet:
                    print(line, end="", flush=True)
            if process.wait():
                raise SystemExit("".join(said[-40:]))
            return said
        yield launch
