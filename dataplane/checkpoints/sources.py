"""Which machines a checkpoint may be fetched from, and how much: a model's path is somebody's input, and must not make
a node ask its own network for it.

A host is resolved once for each connection, every address is checked, and the connection goes to a checked address: no
second answer of the name server counts, redirects included. Proxies named in the environment are not used, since they
would resolve for themselves. `hf://` goes to the hub that the node's operator configured, wherever that is; where it
redirects to is checked as all else is. (Where the environment names a proxy for the hub, that one decides.)
"""

import ipaddress
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import httpcore2 as httpcore
import httpx2 as httpx

from dataplane.protocol.errors import ModelLoadError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Progress = Callable[[int, int], None]
"""Is told bytes done and bytes in total, as far as known; done falls when a file must be begun again. Threads call it.
"""
WEIGHTS = ".safetensors"
REDIRECTS_MAX = 5
_TIMEOUT = httpx.Timeout(30.0)
_THIS_MACHINE = {"127.0.0.1", "::1", "localhost"}
_METADATA = (ipaddress.ip_network("168.63.129.16/32"), ipaddress.ip_network("192.0.0.0/24"))
"""Of clouds, at public addresses. The others are at link-local, private or shared ones, which are all refused."""
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_REWRITTEN = tuple(map(ipaddress.ip_network, ("64:ff9b:1::/48", "::/96", "::ffff:0:0:0/96")))
"""Local NAT64, and two old forms of IPv4 in IPv6: where they lead, a network decides for itself."""


class FetchError(ModelLoadError):
    """A checkpoint that cannot be fetched; the message names the source and what is wrong."""


@dataclass(frozen=True, kw_only=True)
class FetchRules:
    """What may be fetched. `private_hosts`: names, addresses and networks (as 10.1.0.0/16) that are fetched from though
    they are not public; `time_max_s`: for a whole checkpoint.
    """

    private_hosts: tuple[str, ...] = ()
    bytes_max: int = 4 * 2**40
    time_max_s: float = 6 * 3600.0

    def deadline(self, source: str) -> Callable[[], None]:
        """Begin to count: the result raises FetchError once the time is up."""
        ends_s = time.monotonic() + self.time_max_s

        def check() -> None:
            if time.monotonic() > ends_s:
                raise FetchError(f"{source} took longer than {self.time_max_s:g} s")

        return check


PUBLIC = FetchRules()
"""From public addresses only."""


def open_client(rules: FetchRules, *, trusted: str = "") -> httpx.Client:
    """A client that keeps the rules, whatever it is redirected to. Its connections raise FetchError. `trusted`: a host
    that the operator chose; its address is not checked, and it may speak plain http.
    """

    def check(request: httpx.Request) -> None:
        if request.url.host != trusted:
            refuse_plain_http(request)

    return httpx.Client(
        timeout=_TIMEOUT,
        follow_redirects=True,
        max_redirects=REDIRECTS_MAX,
        trust_env=False,
        transport=_CheckedTransport(replace(rules, private_hosts=(*rules.private_hosts, trusted))),
        event_hooks={"request": [check]},
    )


def refuse_plain_http(request: httpx.Request) -> None:
    """A hook for requests: weights travel encrypted, unless they stay on this machine.

    Raises:
        FetchError: plain http to another machine.
    """
    if request.url.scheme == "http" and request.url.host not in _THIS_MACHINE:
        raise FetchError(f"{request.url}: plain http is for this machine alone; use https")


def check_address(host: str, address: Address, rules: FetchRules) -> None:
    """Raise FetchError unless checkpoints may be fetched from this address of a host."""
    inner = _inner(address)
    if host in rules.private_hosts or any(_holds(network, inner) for network in rules.private_hosts):
        return
    if not _is_public(inner):
        shown = "" if host == str(address) else f" ({address})"
        raise FetchError(f"{host}{shown} is no public address; the node's private_hosts may name it")


def _is_public(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address) and address.is_site_local:
        return False
    inside = any(address in network for network in (*_METADATA, *_REWRITTEN))
    return address.is_global and not address.is_multicast and not inside


def _inner(address: Address) -> Address:
    """The IPv4 address that an IPv6 one stands for, if it does."""
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
    """Opens connections to checked addresses only."""

    rules: FetchRules

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        """Connect to the first address of the host that answers; one that is not allowed spoils them all."""
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
                return super().connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure


class _CheckedTransport(httpx.HTTPTransport):
    """HTTP over checked connections. TLS still asks for the host's own name."""

    def __init__(self, rules: FetchRules) -> None:
        super().__init__(trust_env=False)
        self._pool = httpcore.ConnectionPool(
            ssl_context=httpx.create_ssl_context(), network_backend=_CheckedBackend(rules)
        )
