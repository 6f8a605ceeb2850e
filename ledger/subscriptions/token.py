"""Callback tokens: that a caller is the one who was woken, and for which wake.

`generation.mac`; the mac is HMAC-SHA256 over the subscription's id and the generation, under
a secret of the subscription's own. A token needs no expiry: the lease has one, and the next
wake has another generation.
"""

from __future__ import annotations

import base64
import hmac

from ledger.errors import Unauthorized

SECRET_BYTES = 32
MAX_TOKEN_CHARS = 128


def issue(secret: bytes, name: str, generation: int) -> str:
    """The token of one wake of the subscription `name`."""
    said = f"callback\n{generation}\n{name}".encode()
    mac = base64.urlsafe_b64encode(hmac.digest(secret, said, "sha256")).rstrip(b"=")
    return f"{generation}.{mac.decode()}"


def generation_of(secret: bytes, name: str, token: str) -> int:
    """The generation of a token of ours; Unauthorized (TOKEN_INVALID) for any other."""
    number = token.partition(".")[0]
    well_formed = len(token) <= MAX_TOKEN_CHARS and number.isascii() and number.isdigit()
    generation = int(number) if well_formed else 0
    if hmac.compare_digest(token.encode(), issue(secret, name, generation).encode()):
        return generation
    raise Unauthorized("the token is not valid", code="TOKEN_INVALID")
