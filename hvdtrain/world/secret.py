"""The secret of a job: who knows it may write for its ranks.

`hvdtrain launch` draws one for each launch and hands it to the ranks in their environment, to
other hosts through the standard input of the agent or as the starter hands on variables: never on
a command line, never in a file. Where nobody drew one, a key is derived from what the ranks of a
job have in common; that keeps two jobs apart, but keeps nobody out.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from hvdtrain.errors import WorldError
from hvdtrain.world.rendezvous_server import is_sealed, mac

SECRET_VARIABLE = "HVDTRAIN_SECRET"  # noqa: S105 - the name, not the secret
"""Holds the secret of the job in the environment of each rank."""
_SHORTEST = 16


@dataclass(frozen=True)
class JobKey:
    """The key of a job, from its secret; all that is sent is derived from it."""

    secret: str = field(repr=False)

    @property
    def key(self) -> bytes:
        """For the seals."""
        return hashlib.sha256(b"hvdtrain seal " + self.secret.encode()).digest()

    @property
    def capability(self) -> str:
        """The text by which the rendezvous knows the job's ranks; no part of the secret."""
        return mac(self.key, b"capability")[:32]

    def seal(self, path: str, value: bytes) -> bytes:
        """A value with the proof that a rank of the job has set it at `path`."""
        return mac(self.key, path.encode(), value).encode() + value

    def unseal(self, path: str, data: bytes) -> bytes | None:
        """The value that was sealed, or None if it was not, or at another path."""
        return data[64:] if is_sealed(self.key, path, data) else None

    def identify(self, nonce: str, answer: bytes) -> tuple[bool, dict[str, str]]:
        """Whether the answer of a rendezvous is of this job; and what it says of itself."""
        try:
            told = json.loads(answer)
            who: str = told["who"]
            expected = mac(self.key, b"identity", nonce.encode(), who.encode())
            known = json.loads(who)
            return (hmac.compare_digest(str(told["mac"]).encode(), expected.encode()),
                    {str(name): str(value) for name, value in known.items()})
        except (ValueError, KeyError, TypeError, AttributeError):
            return False, {}


def new_secret() -> str:
    """A secret for one launch."""
    return secrets.token_hex(32)


def secret_in(environ: Mapping[str, str]) -> str | None:
    """The secret that the environment holds, or None.

    Raises:
        WorldError: It is too short to be one.
    """
    secret = environ.get(SECRET_VARIABLE)
    if secret is not None and len(secret) < _SHORTEST:
        raise WorldError(
            f"{SECRET_VARIABLE} has {len(secret)} characters. Expected at least {_SHORTEST}, "
            "drawn at random, the same on all ranks: openssl rand -hex 32. Or unset it.")
    return secret


def job_key(environ: Mapping[str, str], identity: str) -> JobKey:
    """The key of the job with this identity.

    Args:
        environ: The environment; the key is secret if the environment holds a secret.
        identity: String that all ranks of the job have and those of other jobs do not.

    Raises:
        WorldError: The secret is too short.
    """
    secret = secret_in(environ) or ""
    return JobKey(hmac.new(secret.encode(), f"hvdtrain job {identity}".encode(),
                           hashlib.sha256).hexdigest())
