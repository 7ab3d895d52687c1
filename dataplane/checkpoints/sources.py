"""Which hosts a checkpoint may be fetched from, and how many bytes. A model's path is untrusted input, which must not
make a node send requests into its own network (server-side request forgery).

A host is resolved once for each connection, redirects included, all its addresses are checked, and the connection goes
to a checked address, so that DNS rebinding has no effect. Proxies of the environment are not used, since they resolve
names themselves. `hf://` goes to the hub that the operator configured, at any address; the targets of its redirects are
checked. (If the environment names a proxy for the hub, the proxy decides.)
"""

import ipaddress
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import httpcore2 as httpcore
import httpx2 as httpx

from dataplane.protocol.errors import ModelLoadError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in total, as far as known, from any thread. Done falls when a download restarts."""
WEIGHTS = ".safetensors"
REDIRECTS_MAX = 5
_TIMEOUT = httpx.Timeout(30.0)
_THIS_MACHINE = {"127.0.0.1", "::1", "localhost"}
_METADATA = (ipaddress.ip_network("168.63.129.16/32"), ipaddress.ip_network("192.0.0.0/24"))
"""Metadata services of clouds at public addresses. The others have link-local, private or shared ones."""
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_TRANSLATED = tuple(map(ipaddress.ip_network, ("64:ff9b:1::/48", "::/96", "::ffff:0:0:0/96")))
"""Local NAT64, and two old forms of IPv4 in IPv6: each network routes them as it likes."""


class FetchError(ModelLoadError):
    """A checkpoint that cannot be fetched; the message names the source and what is wrong."""


@dataclass(frozen=True, kw_only=True)
class FetchRules:
    """Limits of a fetch. `private_hosts`: names, addresses and networks (as 10.1.0.0/16) that are allowed though they
    are not public; `bytes_max` and `time_max_s`: of a whole checkpoint.
    """

    private_hosts: tuple[str, ...] = ()
    bytes_max: int = 4 * 2**40
    time_max_s: float = 6 * 3600.0

    def deadline(self, source: str) -> Callable[[], None]:
        """A function that raises FetchError from `time_max_s` after this call on."""
        ends_s = time.monotonic() + self.time_max_s

        def check() -> None:
            if time.monotonic() > ends_s:
                raise FetchError(f"{source} took longer than {self.time_max_s:g} s")

        return check


PUBLIC = FetchRules()
"""Public addresses only."""


def open_client(rules: FetchRules, *, trusted: str = "") -> httpx.Client:
    """A client that applies the rules to every connection, redirects included, and then raises FetchError. `trusted`: a
    host that the operator configured; its address is not checked, and it may speak plain http.
    """

    def require_https(request: httpx.Request) -> None:
        if request.url.scheme == "http" and request.url.host not in {*_THIS_MACHINE, trusted}:
            raise FetchError(f"{request.url}: plain http is for this machine alone; use https")

    return httpx.Client(
        timeout=_TIMEOUT,
        follow_redirects=True,
        max_redirects=REDIRECTS_MAX,
        trust_env=False,
        transport=_CheckedTransport(replace(rules, private_hosts=(*rules.private_hosts, trusted))),
        event_hooks={"request": [require_https]},
    )


def check_address(host: str, address: Address, rules: FetchRules) -> None:
    """Raise FetchError unless checkpoints may be fetched from this address of a host."""
    inner = _embedded_ipv4(address)
    if host in rules.private_hosts or any(_holds(network, inner) for network in rules.private_hosts):
        return
    if not _is_public(inner):
        shown = "" if host == str(address) else f" ({address})"
        raise FetchError(f"{host}{shown} is no public address; the node's private_hosts may name it")


def _is_public(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address) and address.is_site_local:
        return False
    inside = any(address in network for network in (*_METADATA, *_TRANSLATED))
    return address.is_global and not address.is_multicast and not inside


def _embedded_ipv4(address: Address) -> Address:
    """The IPv4 address that an IPv6 address embeds, else the address itself."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else address)


def _holds(network: str, address: Address) -> bool:
    try:
        return address in ipaddress.ip_network(network, strict=False)
    except ValueError:
        return False  # a name


@dataclass
class _CheckedBackend(httpcore.SyncBackend):
    """Opens connections to allowed addresses only."""

    rules: FetchRules

    def connect_tcp(self, host: str, port: int, *args: Any, **options: Any) -> httpcore.NetworkStream:
        """Connect to the first address that answers. If one address is not allowed, none is used."""
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise httpcore.ConnectError(f"{host} is not known: {error}") from error
        addresses = [str(answer[4][0]) for answer in found]
        for address in addresses:
            check_address(host, ipaddress.ip_address(address.partition("%")[0]), self.rules)
        failure: Exception = httpcore.ConnectError(f"{host} has no address")
        for address in dict.fromkeys(addresses):
            try:
                return super().connect_tcp(address, port, *args, **options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure


class _CheckedTransport(httpx.HTTPTransport):
    """HTTP over such connections. TLS verifies the host's name, not the address."""

    def __init__(self, rules: FetchRules) -> None:
        super().__init__(trust_env=False)
        self._pool = httpcore.ConnectionPool(
            ssl_context=httpx.create_ssl_context(), network_backend=_CheckedBackend(rules)
        )
