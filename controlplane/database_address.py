"""Addresses of Postgres: libpq's spelling, which operators write, as SQLAlchemy and our driver take it."""

from collections.abc import Mapping
from urllib.parse import quote, urlencode

_SCHEMES = frozenset({"postgres", "postgresql", "postgresql+psycopg"})
_DRIVER = "postgresql+psycopg"
_FORM = "must be postgresql://USER:PASSWORD@HOST:PORT[,HOST:PORT...]/DATABASE"
_PORT = "5432"
_SESSIONS = frozenset({"any", "read-write", "read-only", "primary", "standby", "prefer-standby"})
CONNECT_TIMEOUT_S = 3
"""Limit for connecting to one of several hosts: one that is cut off must not keep the others waiting."""


def psycopg_url(url: str) -> str:
    """A Postgres address, in whichever of libpq's spellings, as SQLAlchemy takes it. What is returned is itself such an
    address but for its scheme. Of several hosts, connections go to the one that takes writes unless the address says
    otherwise.

    Raises:
        ValueError: it is no address of a Postgres; the message holds nothing of it.
    """
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in _SCHEMES:
        raise ValueError(_FORM)
    given = _parsed(f"postgresql://{rest}")
    hosts = given.pop("host", "").split(",")
    ports = _ports(given.pop("port", ""), len(hosts))
    user, password, database = (quote(given.pop(name, ""), safe="") for name in ("user", "password", "dbname"))
    if given.get("target_session_attrs", "any") not in _SESSIONS:
        raise ValueError(f"target_session_attrs must be one of {', '.join(sorted(_SESSIONS))}")
    if len(hosts) > 1:
        if not all(hosts):
            raise ValueError(f"{_FORM}: a host is empty")
        several = {"target_session_attrs": "read-write", "connect_timeout": str(CONNECT_TIMEOUT_S)}
        given = {"host": ",".join(hosts), "port": ",".join(ports), **several, **given}
        place = ""
    elif hosts[0].startswith("/"):
        given = {"host": hosts[0], "port": ports[0], **given}
        place = ""
    else:
        place = (f"[{hosts[0]}]" if ":" in hosts[0] else hosts[0]) + (f":{ports[0]}" if hosts[0] else "")
    user = f"{user}:{password}@" if password else f"{user}@" if user else ""
    query = f"?{urlencode(given, quote_via=quote, safe=',')}" if given else ""
    return f"{_DRIVER}://{user}{place}/{database}{query}"


def libpq_url(url: str) -> str:
    """What `psycopg_url` returned, as psycopg without SQLAlchemy takes it."""
    return url.replace(f"{_DRIVER}://", "postgresql://", 1)


def _parsed(url: str) -> dict[str, str]:
    """The parameters of an address by libpq's own parser. Its messages may quote passwords, so they are not shown."""
    import psycopg.conninfo  # noqa: PLC0415  (the agent reads settings without it: it belongs to an extra)

    if url.partition("?")[2].count("host=") > 1:
        raise ValueError(f"{_FORM}; the parameter host may be given once")
    try:
        found: Mapping[str, object] = psycopg.conninfo.conninfo_to_dict(url)
    except psycopg.Error:
        raise ValueError(
            f"{_FORM}; libpq does not understand the address: special characters of a password are written as %XX, "
            "and parameters after ? must be libpq's"
        ) from None
    return {name: str(value) for name, value in found.items()}


def _ports(given: str, hosts: int) -> list[str]:
    """A port for each host: one holds for all of them, and one that is empty is the default."""
    ports = given.split(",")
    if len(ports) == 1:
        ports *= hosts
    if len(ports) != hosts:
        raise ValueError(f"there are {hosts} hosts and {len(ports)} ports; give one port, or one for each host")
    ports = [port or _PORT for port in ports]
    if not all(port.isascii() and port.isdigit() and 1 <= int(port) <= 65535 for port in ports):
        raise ValueError(f"{_FORM}: a port must be a number from 1 to 65535")
    return ports
