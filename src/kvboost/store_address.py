"""Addresses of stores that several machines share: which there are, and how they are shown.

Imports nothing heavy, so that an option can be checked before anything is loaded.
"""

from __future__ import annotations

from kvboost.errors import InvalidRequestError

REMOTE_SCHEMES = ("redis", "rediss", "unix", "redis+cluster", "rediss+cluster", "s3")


def without_password(address: str) -> str:
    """The address of a shared store as it can be shown, even if its password is not escaped as it must be."""
    scheme, mark, rest = address.partition("://")
    if not mark:
        return f"{address.rpartition('@')[2].partition('?')[0]}"
    if scheme == "s3":
        bucket, slash, path = rest.partition("?")[0].partition("/")
        return f"s3://{bucket.rpartition('@')[2]}{slash}{path}"
    if "?" in rest.rpartition("@")[0]:  # what stands behind the last @ may be a piece of a password
        return f"{scheme}://..."
    return f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}"


def check_remote_address(address: object) -> str:
    """The address of a shared store, if it is one. What is said of another shows no password."""
    if not isinstance(address, str) or address.partition("://")[0] not in REMOTE_SCHEMES:
        words = ", ".join(f"{each}://" for each in REMOTE_SCHEMES)
        shown = without_password(address) if isinstance(address, str) else repr(address)
        raise InvalidRequestError(f"remote_cache must be an address that begins with {words}; got {shown}")
    return address
