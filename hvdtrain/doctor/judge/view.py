"""`HostView`: a host with its facts and what this side measured of it."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.doctor.facts import HostFacts


@dataclass(frozen=True, kw_only=True)
class HostView:
    """A host that answered."""

    name: str
    facts: HostFacts
    slots: int | None = None
    """Ranks that it is to take; None where nobody said."""
    is_local: bool = False
    answer_s: float = 0.0
    """From the start of ssh to the first answer."""
    noise: tuple[str, ...] = ()
    """What a login script printed."""
    clock_offset_s: float = 0.0
    """Its clock minus this one."""
    clock_error_s: float = 0.0
    """At most so much is the measurement off: half of the round trip."""
