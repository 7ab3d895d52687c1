"""A model's path cannot make a node send requests into its own network, by a name or a redirect, or fetch forever."""

import ipaddress
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from dataplane.checkpoints.fetch import fetch_checkpoint
from dataplane.checkpoints.sources import PUBLIC, FetchError, FetchRules, check_address, open_client
from tests.dataplane.registry import Registry

HERE = FetchRules(private_hosts=("127.0.0.1",))
INSIDE = [
    "127.0.0.1", "127.8.9.1", "0.0.0.0", "10.0.0.1", "172.16.5.5", "192.168.1.1", "169.254.169.254", "100.64.0.1",
    "100.100.100.200", "192.0.0.192", "168.63.129.16", "224.0.0.1", "239.1.1.1", "224.0.1.1", "255.255.255.255",
    "240.0.0.1", "198.18.0.1", "::1", "::", "fe80::1", "fd00:ec2::254", "fc00::1", "ff02::1", "::ffff:10.0.0.1",
    "::ffff:169.254.169.254", "64:ff9b::a00:1", "2002:7f00:1::", "2001:db8::1",
    "fec0::1", "64:ff9b:1::a00:1", "::7f00:1", "::10.0.0.1", "::8.8.8.8", "::ffff:0:10.0.0.1",
]  # fmt: skip
OUTSIDE = ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]


@pytest.mark.parametrize("address", INSIDE)
def test_addresses_that_are_not_public_are_refused(address: str) -> None:
    with pytest.raises(FetchError, match="no public address"):
        check_address("registry.example", ipaddress.ip_address(address), PUBLIC)


@pytest.mark.parametrize("address", OUTSIDE)
def test_public_addresses_are_not(address: str) -> None:
    check_address("registry.example", ipaddress.ip_address(address), PUBLIC)


def test_private_hosts_and_networks_may_be_allowed() -> None:
    rules = FetchRules(private_hosts=("registry.house", "10.1.0.0/16", "fd00::/8", "127.0.0.1"))
    for host, address in (("registry.house", "192.168.0.9"), ("a", "10.1.2.3"), ("a", "::ffff:10.1.2.3"),
                          ("a", "fd00::1"), ("127.0.0.1", "127.0.0.1")):  # fmt: skip
        check_address(host, ipaddress.ip_address(address), rules)
    for host, address in (("a", "10.2.0.1"), ("evil.registry.house", "192.168.0.9"), ("a", "127.0.0.2")):
        with pytest.raises(FetchError):
            check_address(host, ipaddress.ip_address(address), rules)


@pytest.fixture
def registry() -> Iterator[Registry]:
    started = Registry({"config.json": b"{}"})
    yield started
    started.close()


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Answers of the name server by host, one per query; the last one is repeated."""
    known: dict[str, list[str]] = {}
    real: Callable[..., Any] = socket.getaddrinfo

    def resolve(host: Any, port: Any, *args: Any, **options: Any) -> Any:
        answers = known.get(host)
        if answers is None:
            return real(host, port, *args, **options)
        shown = answers.pop(0) if len(answers) > 1 else answers[0]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in shown.split()]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return known


def test_by_default_this_machine_is_not_fetched_from(registry: Registry, tmp_path: Path) -> None:
    for url in (registry.url, registry.url.replace("127.0.0.1", "localhost")):
        with pytest.raises(FetchError, match="no public address"):
            fetch_checkpoint(url, tmp_path, backoff_s=0)
    assert registry.requests == []


@pytest.mark.parametrize(
    "url", ["https://0x7f000001/m", "https://2130706433/m", "https://0177.0.0.1/m", "https://[::1]/m"]
)
def test_odd_spellings_of_this_machine(tmp_path: Path, url: str) -> None:
    with pytest.raises(FetchError, match=r"no public address|is not known|cannot be fetched"):
        fetch_checkpoint(url, tmp_path, backoff_s=0)


def test_a_name_of_a_private_address_is_refused(names: dict[str, list[str]], tmp_path: Path) -> None:
    for answers in (["10.0.0.1"], ["8.8.8.8 10.0.0.1"]):
        names["registry.example"] = answers
        with pytest.raises(FetchError, match=r"registry.example \(10.0.0.1\) is no public address"):
            fetch_checkpoint("https://registry.example/m", tmp_path, backoff_s=0)


def test_a_name_is_resolved_once_per_connection(
    names: dict[str, list[str]], registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DNS rebinding: the checked answer is the one that is connected to."""
    names["registry.example"] = ["8.8.8.8", "127.0.0.1"]
    connected: list[str] = []

    def connect(address: tuple[str, int], *_: Any, **__: Any) -> Any:
        connected.append(address[0])
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", connect)
    with open_client(PUBLIC) as client, pytest.raises(httpx.ConnectError):
        client.get("https://registry.example/m")
    assert connected == ["8.8.8.8"]


def test_a_redirect_to_a_private_address_is_refused(
    registry: Registry, names: dict[str, list[str]], tmp_path: Path
) -> None:
    names["inside.example"] = ["169.254.169.254"]
    for target in ("https://inside.example/latest", "https://169.254.169.254/latest", "https://[fd00:ec2::254]/"):
        registry.answers.append(302)
        registry.location = target
        with pytest.raises(FetchError, match="no public address"):
            fetch_checkpoint(registry.url, tmp_path, backoff_s=0, rules=HERE)


def test_redirects_without_end(registry: Registry, tmp_path: Path) -> None:
    registry.answers += [302] * 20
    registry.location = f"{registry.url}manifest.json"
    with pytest.raises(FetchError, match="redirects more than 5 times"):
        fetch_checkpoint(registry.url, tmp_path, backoff_s=0, rules=HERE)
    assert len(registry.requests) <= 6


def test_sizes_and_time_end(registry: Registry, tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="has 2 bytes; at most 1 are fetched"):
        fetch_checkpoint(registry.url, tmp_path, rules=FetchRules(private_hosts=HERE.private_hosts, bytes_max=1))
    with pytest.raises(FetchError, match="took longer than 1e-09 s"):
        fetch_checkpoint(registry.url, tmp_path, rules=FetchRules(private_hosts=HERE.private_hosts, time_max_s=1e-9))
    assert not list(tmp_path.iterdir())


def test_proxies_of_the_environment_are_not_used(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert fetch_checkpoint(registry.url, tmp_path, backoff_s=0, rules=HERE) == tmp_path
