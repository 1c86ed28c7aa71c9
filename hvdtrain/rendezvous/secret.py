"""The secret of a job: who knows it may write for its ranks.

`hvdtrain launch` creates one for each launch and passes it to the ranks in their environment, to
other hosts through the standard input of the agent or as the starter passes variables: never on a
command line, never in a file. Without one, a key is derived from what the ranks of a job have in
common; that keeps two jobs apart, but gives no protection.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from hvdtrain.errors import WorldError
from hvdtrain.rendezvous.store import is_sealed, mac

SECRET_VARIABLE = "HVDTRAIN_SECRET"  # noqa: S105 - the name, not the secret
_SHORTEST = 16
TWIN = ("Was the job started twice, or do two jobs have the same hosts, ports and sizes? End the "
        f"other, or give each job a {SECRET_VARIABLE} of its own, the same on all of its ranks.")


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
        """The text that identifies the job's ranks to the rendezvous; no part of the secret."""
        return mac(self.key, b"capability")[:32]

    def seal(self, path: str, value: bytes) -> bytes:
        """A value with the proof that a rank of the job has set it at `path`."""
        return mac(self.key, path.encode(), value).encode() + value

    def unseal(self, path: str, data: bytes) -> bytes | None:
        """The sealed value, or None if it was not sealed for this path."""
        return data[64:] if is_sealed(self.key, path, data) else None

    def identify(self, nonce: str, answer: bytes) -> tuple[bool, dict[str, str]]:
        """Whether the answer of a rendezvous is from this job; and its content."""
        try:
            told = json.loads(answer)
            who: str = told["who"]
            expected = mac(self.key, b"identity", nonce.encode(), who.encode())
            known = {str(name): str(value) for name, value in json.loads(who).items()}
            return hmac.compare_digest(str(told["mac"]).encode(), expected.encode()), known
        except (ValueError, KeyError, TypeError, AttributeError):
            return False, {}


def new_secret() -> str:
    """A secret for one launch."""
    return os.urandom(32).hex()


def secret_in(environ: Mapping[str, str]) -> str | None:
    """The secret in the environment, or None; WorldError where it is too short."""
    secret = environ.get(SECRET_VARIABLE)
    if secret is not None and len(secret) < _SHORTEST:
        raise WorldError(
            f"{SECRET_VARIABLE} has {len(secret)} characters. Expected at least {_SHORTEST}, "
            "drawn at random, the same on all ranks: openssl rand -hex 32. Or unset it.")
    return secret


def job_key(environ: Mapping[str, str], identity: str) -> JobKey:
    """The key of a job, from the secret in the environment, else from `identity`."""
    # `identity` is a text that all ranks of the job share and those of other jobs do not.
    secret, text = (secret_in(environ) or "").encode(), f"hvdtrain job {identity}".encode()
    return JobKey(hmac.new(secret, text, hashlib.sha256).hexdigest())
