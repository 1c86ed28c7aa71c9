"""Starts the agents of a job, and waits until each has sent the facts of its host."""

from __future__ import annotations

import selectors
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import cast

from hvdtrain.errors import EXIT_NOT_STARTED
from hvdtrain.launch.facts import for_all
from hvdtrain.launch.link import AgentLink

_ANSWER_LIMIT_S = 60.0  # a host may accept and then be silent (a hanging home directory)
_POLL_S, _REAP_S = 0.1, 2.0
# Logins that are under way: each may cost 0.1 s of a core here, and ssh gives up after 10 s.
_AT_ONCE = 64


def await_facts(links: Mapping[str, AgentLink], start: Callable[[AgentLink], None],
                 give_up: Callable[[Collection[str]], bool], *,
                 at_once: int = _AT_ONCE) -> dict[str, str]:
    """Start agents, so many at once, until all have sent their facts; what is wrong with others."""
    silent, problems = dict[AgentLink, float](), dict[str, str]()
    # That of this host first: it is a fork, before there are threads.
    ahead = deque(sorted(links.values(), key=lambda link: not link.is_local))
    with selectors.DefaultSelector() as selector:
        while (ahead or silent) and not give_up([link.host for link in (*silent, *ahead)]):
            now = time.monotonic()
            wave = [ahead.popleft() for _ in range(min(len(ahead), at_once - len(silent)))]
            for link in _prepared(wave):
                start(link)
                selector.register(link, selectors.EVENT_READ)
                silent[link] = now + _ANSWER_LIMIT_S
            for key, _ in selector.select(_POLL_S):
                link = cast(AgentLink, key.fileobj)
                ended = link.read() is None
                if ended or link.facts is not None:
                    selector.unregister(link)
                    del silent[link]
                if ended and link.facts is None:
                    problems[link.host] = why_ended(link)
            for link in [link for link, deadline in silent.items() if deadline <= now]:
                selector.unregister(link)
                del silent[link]
                link.reap(0.0)
                problems[link.host] = (f"no answer in {_ANSWER_LIMIT_S:g} s. Does a login script "
                                       "there wait for something?")
    return problems


def _prepared(links: Sequence[AgentLink]) -> Iterator[AgentLink]:
    """That of this host at once, the others when the configuration of ssh was read for all."""
    yield from (link for link in links if link.is_local)
    for_all(AgentLink.prepare, others := [link for link in links if not link.is_local])
    yield from others


def why_ended(link: AgentLink) -> str:
    """Why an agent has ended before it was of use."""
    code = link.reap(_REAP_S)
    said = "; ".join(link.last_words) or "it said nothing"
    return (f"{said}. Expected this Python at the same path there: a shared file system, or the "
            "same installation on every host" if code == EXIT_NOT_STARTED
            else f"exit code {code}, {said}")
