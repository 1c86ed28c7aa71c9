"""The keys and values of a rendezvous, and what may be set. Standard library only."""

import hashlib
import hmac
import re

PEERS = "peers."
"""`peers.R.SIZE` in a scope of Horovod is what all of its members have told member R."""
_ASKS_PEERS = re.compile(r"peers\.(\d{1,7})\.(\d{1,7})")
_OWN_SCOPE = re.compile(r"hvdtrain\.[a-z0-9_.]{1,64}")
_OWN_KEY = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_GLOO_KEY = re.compile(r"(?:rank_)?(\d{1,7})")
_PROCESS_SET = re.compile(r"_process_set_hash_[0-9a-f]{1,16}")
_OWN_BYTES = 1 << 20
_PROCESS_SETS = 256


def mac(key: bytes, *parts: bytes) -> str:
    """The HMAC-SHA256 of some texts and their lengths."""
    joined = b"".join(b"%d:%s" % (len(part), part) for part in parts)
    return hmac.new(key, joined, hashlib.sha256).hexdigest()


def is_sealed(key: bytes, path: str, data: bytes) -> bool:
    """Whether a value (its MAC, then the value) was sealed for this path."""
    return hmac.compare_digest(data[:64], mac(key, path.encode(), data[64:]).encode())


def part_for(rank: int, values: list[bytes]) -> bytes:
    """What each member has told one of them. A value has equal parts for all members but its own.

    Empty where the values are not so.
    """
    lengths, others = {len(value) for value in values}, len(values) - 1
    if others < 1 or len(lengths) != 1 or (length := lengths.pop()) % others:
        return b""
    size = length // others
    return b"".join(value[place * size:(place + 1) * size] for other, value in enumerate(values)
                    if other != rank for place in [rank - (rank > other)])


class KeyValueStore:
    """The keys and values of all scopes, with their limits."""
    # `sizes` has the number of members of each Horovod scope; `key` seals values of hvdtrain's
    # scopes.

    def __init__(self, sizes: dict[str, int], key: bytes) -> None:
        self._sizes, self._key = sizes, key
        self._values: dict[str, dict[str, bytes]] = {}
        self._left: dict[str, set[str]] = {}
        self._bytes = 0
        size = sizes.get("global", 1)
        self._most_bytes = (64 << 20) + 1024 * size * size
        self._most_keys = 64 * size + 1024
        self._most_scopes = len(sizes) * (1 + _PROCESS_SETS) + _PROCESS_SETS

    def limit(self, scope: str) -> int:
        """The largest value in this scope, in bytes."""
        if _OWN_SCOPE.fullmatch(scope):
            return _OWN_BYTES
        return 4096 + 256 * self._members(scope)  # Gloo's addresses have 136 bytes for each peer

    def get(self, scope: str, name: str) -> bytes | None:
        """A value; for `peers.R.SIZE` what each of so many members has told member R."""
        held = self._values.get(scope, {})
        if (asked := _ASKS_PEERS.fullmatch(name)) is None:
            return held.get(name)
        rank, size = int(asked[1]), int(asked[2])
        if not rank < size <= min(self._members(scope), len(held)):
            return None
        values = [held[key] for key in map(str, range(size)) if key in held]
        return part_for(rank, values) if len(values) == size else None

    def put(self, scope: str, name: str, value: bytes) -> int:
        """Set a value once; returns the HTTP status."""
        former = self.get(scope, name)
        if former is not None:
            return 200 if former == value else 409
        if not self._may_set(scope, name, value):
            return 403
        held = self._values.get(scope, {})
        if self._bytes + len(value) > self._most_bytes or len(held) >= self._most_keys or (
                scope not in self._values and len(self._values) >= self._most_scopes):
            return 507
        self._values.setdefault(scope, {})[name] = value
        self._bytes += len(value)
        return 200

    def delete(self, scope: str, name: str) -> int:
        """Note that a member has left its scope; the last empties it. Returns the HTTP status."""
        if not name.isdigit() or int(name) >= self._members(scope):
            return 403
        if scope not in self._sizes:  # of a process set, which comes and goes
            self._forget(scope, [name])
            return 200
        left = self._left.setdefault(scope, set())
        left.add(name)
        if len(left) >= self._sizes[scope]:
            del self._left[scope]
            self._forget(scope, list(self._values.get(scope, {})))
        return 200

    def _may_set(self, scope: str, name: str, value: bytes) -> bool:
        if _OWN_SCOPE.fullmatch(scope):
            return _OWN_KEY.fullmatch(name) is not None and is_sealed(
                self._key, f"{scope}/{name}", value)
        found = _GLOO_KEY.fullmatch(name)
        return found is not None and int(found[1]) < self._members(scope)

    def _members(self, scope: str) -> int:
        """The most members of a scope of Horovod; 0 for a scope that it does not use."""
        base, mark, tail = scope.partition("_process_set_hash_")
        if mark and _PROCESS_SET.fullmatch(mark + tail) is None:
            return 0
        return self._sizes.get(base, 0)

    def _forget(self, scope: str, names: list[str]) -> None:
        held = self._values.get(scope, {})
        for name in names:
            self._bytes -= len(held.pop(name, b""))
        if not held:
            self._values.pop(scope, None)
