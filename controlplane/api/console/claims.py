"""Who a person is, and which role the person has, by the claims of an OpenID provider."""

from collections.abc import Mapping
from typing import Any

from controlplane.errors import PermissionDeniedError
from controlplane.settings import Settings
from controlplane.store.console import Identity, SessionSource
from controlplane.store.tables import Role

_RANKED = (Role.ADMIN, Role.OPERATOR, Role.VIEWER)
_NAME_CHARS_MAX = 200
_SHOWN_MAX = 10


def identity_of_claims(claims: Mapping[str, Any], id_token: str, settings: Settings) -> Identity:
    """The person, with the highest role that one of its groups has.

    Raises:
        PermissionDeniedError: none of its groups has a role.
    """
    name = _name(claims, settings)
    found = claim_at(claims, settings.oidc_role_claim)
    values = [found] if isinstance(found, str) else found if isinstance(found, list) else []
    groups = [value for value in values if isinstance(value, str)]
    given = {Role(name) for name, wanted in settings.oidc_roles.items() if set(groups) & set(wanted)}
    role = next((role for role in _RANKED if role in given), None)
    if role is None:
        shown = ", ".join(groups[:_SHOWN_MAX]) or "nothing"
        raise PermissionDeniedError(
            f"You are signed in as {name}, but none of your groups has a role in Tidepool."
            f" The claim '{settings.oidc_role_claim}' holds: {shown}"
        )
    return Identity(
        source=SessionSource.OIDC,
        subject=str(claims["sub"]),
        issuer=str(claims["iss"]),
        name=name,
        role=role,
        tenant=settings.oidc_tenant,
        id_token=id_token,
    )


def claim_at(claims: Mapping[str, Any], path: str) -> Any:
    """The claim of that name, or, where none has it, the one that dots lead to; None: there is none."""
    if path in claims:
        return claims[path]
    found: Any = claims
    for part in path.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _name(claims: Mapping[str, Any], settings: Settings) -> str:
    """What the person is called, by the subject where the claim is absent. It stands in the audit: one line."""
    found = claim_at(claims, settings.oidc_name_claim)
    name = found if isinstance(found, str) and found.strip() else str(claims["sub"])
    return "".join(each for each in name if each.isprintable()).strip()[:_NAME_CHARS_MAX]
