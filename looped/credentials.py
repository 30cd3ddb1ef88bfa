"""Credentials: not taken in addresses, since those are stored and shown, and left out of what others' errors say."""

from __future__ import annotations

import os
import re

_USER = re.compile(r"(\b[A-Za-z][A-Za-z0-9+.-]*://)([^/?#\s]*)@")
_SIGNED = re.compile(
    r"(?i)([?&](?:[\w-]*(?:signature|token|secret|password|credential|api[_-]?key)|key|sig)=)[^&#\s'\"]+"
)
_NAMED = re.compile(r"(?i)(_|^)(API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE)$")
_SHORTEST = 8
"""A shorter value is no secret, and would be found in words that have nothing to do with it."""


def check_address(field: str, text: str | None) -> None:
    """Raises `UserError`, which does not repeat it, where `text` is an address with a password or a signature."""
    if text is not None and without(text, environment={}) != text:
        from looped.errors import UserError  # which itself leaves credentials out

        raise UserError(
            f"{field} has a name, a password or a key in its address, which would be stored; give a plain one, and the"
            " credentials in the way that its service has for them (environment, login, file)."
        )


def without(text: str, environment: dict[str, str] | None = None) -> str:
    """Returns `text` with *** for passwords and keys in addresses, and for the secrets of the environment.

    Those are the variables whose names end as WANDB_API_KEY and HF_TOKEN do.
    """
    values = os.environ if environment is None else environment
    for name, value in values.items():
        if _NAMED.search(name) and len(value.strip()) >= _SHORTEST:
            text = hidden(text, value)
    return _SIGNED.sub(r"\1***", _USER.sub(_without_user, text))


def hidden(text: str, secret: str) -> str:
    """Returns `text` with *** for `secret`, and for each longer line of it where it has several."""
    parts = {part.strip() for part in secret.splitlines() if len(part.strip()) >= _SHORTEST}
    for part in sorted(parts | {secret.strip()}, key=len, reverse=True):
        text = text.replace(part, "***") if part else text
    return text


def _without_user(found: re.Match[str]) -> str:
    """A user alone is no secret where keys are sent otherwise, as in ssh://git@host."""
    scheme, user = found.groups()
    plain = ":" not in user and scheme.rpartition("+")[2] in ("ssh://", "sftp://")
    return found[0] if plain else f"{scheme}***@"
