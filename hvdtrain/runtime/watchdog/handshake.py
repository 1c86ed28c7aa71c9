"""How a member and rank 0 prove to each other that they know the token, which is never sent.

1. Rank 0 sends `{"nonce": N}`.
2. The member sends `{"rank": R, "nonce": M, "mac": ...}`, signed over both nonces and the rank.
3. Rank 0 sends `{"alive": true, "mac": ...}`, signed over both nonces.
"""

from __future__ import annotations

import hmac
import secrets
from typing import Any

from hvdtrain.world.rendezvous_server import mac


def new_nonce() -> str:
    """A text that was never sent before."""
    return secrets.token_hex(16)


def hello_of(token: str, rank: int, their_nonce: str, my_nonce: str) -> dict[str, Any]:
    """What a member sends."""
    return {"rank": rank, "nonce": my_nonce,
            "mac": _mac(token, "member", their_nonce, my_nonce, str(rank))}


def is_hello(message: dict[str, Any], token: str, my_nonce: str) -> bool:
    """Whether a message is that of a member, for rank 0."""
    expected = _mac(token, "member", my_nonce, str(message.get("nonce")), str(message.get("rank")))
    return _same(message, expected)


def welcome_of(token: str, hello: dict[str, Any], my_nonce: str) -> dict[str, Any]:
    """What rank 0 answers."""
    return {"alive": True, "mac": _mac(token, "chief", my_nonce, str(hello.get("nonce")))}


def is_welcome(message: dict[str, Any], token: str, their_nonce: str, my_nonce: str) -> bool:
    """Whether a message is that of rank 0, for a member."""
    return _same(message, _mac(token, "chief", their_nonce, my_nonce))


def _mac(token: str, *parts: str) -> str:
    return mac(token.encode(), *(part.encode() for part in parts))


def _same(message: dict[str, Any], expected: str) -> bool:
    return hmac.compare_digest(str(message.get("mac")).encode(), expected.encode())
