"""Our own starter: an agent on each host and a Gloo rendezvous. `launch/native.py` does it."""

from __future__ import annotations

from collections.abc import Mapping

from hvdtrain.launch.starters.base import Request, Starter


class Native(Starter):
    """It has no command line; agents start the program of each rank."""

    name = "native"

    def check(self, request: Request) -> list[str]:
        self.refuse_mpi(request)
        return []

    def command(self, request: Request, env: Mapping[str, str]) -> tuple[str, ...]:
        return request.options.command


STARTER = Native()
