"""The API's address and key of a command, found as `tidepool up` and `tidepool api` find theirs."""

from collections.abc import Mapping
from dataclasses import dataclass

from ops.client.home import EmbeddedError, home_of, keys_file, read_api_url, read_secrets

_EVERYWHERE = frozenset({"", "0.0.0.0", "::"})  # noqa: S104  (compared with, not bound)
_CLIENTS = ("tp-client-", "tp-node-")


class CredentialError(Exception):
    """No address or no key; the message names the setting."""


@dataclass(frozen=True, kw_only=True)
class Credential:
    """A key, and its origin."""

    secret: str
    source: str


def api_url(given: str | None, environment: Mapping[str, str]) -> str:
    """--url, TIDEPOOL_URL, else this machine's API: TIDEPOOL_HOST, TIDEPOOL_PORT and whether it has a certificate.
    Where none of these is set, the address that a running `tidepool up` keeps in its home.

    Raises:
        CredentialError: TIDEPOOL_PORT is no port, or the kept address cannot be read.
    """
    if url := given or environment.get("TIDEPOOL_URL"):
        return url
    if not (environment.get("TIDEPOOL_HOST") or environment.get("TIDEPOOL_PORT")):
        try:
            kept = read_api_url(home_of(environment))
        except EmbeddedError as error:
            raise CredentialError(str(error)) from error
        if kept is not None:
            return kept
    port = environment.get("TIDEPOOL_PORT") or "8080"
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise CredentialError(f"TIDEPOOL_PORT must be 1 to 65535: '{port}'")
    host = environment.get("TIDEPOOL_HOST", "")
    host = "127.0.0.1" if host in _EVERYWHERE else f"[{host}]" if ":" in host else host
    scheme = "https" if environment.get("TIDEPOOL_TLS_CERT_FILE") else "http"
    return f"{scheme}://{host}:{port}"


def admin_key(given: str | None, environment: Mapping[str, str]) -> Credential:
    """--key, TIDEPOOL_ADMIN_KEY, then `admin` of keys.json. TIDEPOOL_KEY, which clients have, comes before keys.json
    only where it is no client's key, and is the last resort where it is.

    Raises:
        CredentialError: there is none.
    """
    if given:
        return Credential(secret=given, source="--key")
    if secret := environment.get("TIDEPOOL_ADMIN_KEY"):
        return Credential(secret=secret, source="TIDEPOOL_ADMIN_KEY")
    of_client = environment.get("TIDEPOOL_KEY")
    if of_client and not of_client.startswith(_CLIENTS):
        return Credential(secret=of_client, source="TIDEPOOL_KEY")
    home = home_of(environment)
    file = keys_file(home)
    try:
        secret = read_secrets(home).get("admin")
    except EmbeddedError as error:
        secret, why = None, str(error)
    else:
        why = f"{file} holds no admin key" if file.exists() else f"{file} does not exist"
    if secret:
        return Credential(secret=secret, source=str(file))
    if of_client:
        return Credential(secret=of_client, source="TIDEPOOL_KEY")
    raise CredentialError(f"no key: set TIDEPOOL_ADMIN_KEY, or give --key ({why})")


def client_key(given: str | None, environment: Mapping[str, str]) -> Credential:
    """The key of commands that do what clients do: --key, TIDEPOOL_KEY, else the admin key.

    Raises:
        CredentialError: there is none.
    """
    if not given and (secret := environment.get("TIDEPOOL_KEY")):
        return Credential(secret=secret, source="TIDEPOOL_KEY")
    return admin_key(given, environment)
