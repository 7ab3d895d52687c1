"""Which sources of a checkpoint are allowed by their shape."""

import posixpath
import re
from urllib.parse import unquote, urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.protocol.model_sources import SOURCE_CHARACTERS_MAX, check_source

GOOD = (
    "/models/qwen3-8b",
    "/models/qwen3-8b/",
    "/models/my model/model.gguf",
    "/",
    "https://models.example.org/tiny/",
    "https://models.example.org",
    "https://models.example.org:8443",
    "https://10.0.0.7/a.b/c%20d",
    "https://[2001:db8::1]:8443/m",
    "http://127.0.0.1:8000/tiny/",
    "http://localhost/tiny",
    "http://[::1]:8000/tiny/",
    "hf://Qwen/Qwen3-8B",
    "hf://Qwen/Qwen3-8B@main",
    "hf://Qwen/Qwen3-8B@refs/pr/1",
    "hf://org/some_name.v2@v1.0",
)
BAD = (
    ("", "absolute path"),
    ("models/relative", "absolute path"),
    ("~/models", "absolute path"),
    ("ftp://example.org/m", "absolute path"),
    ("file:///etc", "absolute path"),
    ("HF://org/name", "absolute path"),
    ("/etc/\n/x", "control characters"),
    ("/etc/passwd\n", "control characters"),
    ("/a\0b", "control characters"),
    ("/a\x7fb", "control characters"),
    ("/a\u202eb", "invisible"),
    ("/a\ud800", "invisible"),
    ("/models/../etc", "'..'"),
    ("/models/./m", "'.'"),
    ("/models//m", "empty"),
    ("//models/m", "empty"),
    ("/..", "'..'"),
    ("/" + "a" * SOURCE_CHARACTERS_MAX, "at most 4096"),
    ("hf://name", "not of the form"),
    ("hf://a/b/c", "not of the form"),
    ("hf://../..", "not of the form"),
    ("hf://a/..@../../x", "not of the form"),
    ("hf://a/.b", "not of the form"),
    ("hf://-a/b", "not of the form"),
    ("hf://a/b-", "not of the form"),
    ("hf://a/ü", "not of the form"),
    ("hf://a/" + "b" * 96, "not of the form"),
    ("hf://a/b..c", "'..'"),
    ("hf://a/b--c", "'--'"),
    ("hf://a/b.git", "'.git'"),
    ("hf://a/b@", "no name of a branch"),
    ("hf://a/b@../../x", "no name of a branch"),
    ("hf://a/b@/x", "no name of a branch"),
    ("hf://a/b@x/", "no name of a branch"),
    ("hf://a/b@x//y", "no name of a branch"),
    ("hf://a/b@.x", "no name of a branch"),
    ("hf://a/b@x y", "no name of a branch"),
    ("hf://a/b@x?y", "no name of a branch"),
    ("hf://a/b@x@{1}", "no name of a branch"),
    ("hf://a/b@%2F%2e", "no name of a branch"),
    ("hf://a/b@%2e%2e%2fx", "no name of a branch"),
    ("https://", "name a host"),
    ("https:///m/", "name a host"),
    ("https://exa mple.org/", "name a host"),
    ("https://example.org:0/", "port"),
    ("https://example.org:/", "port"),
    ("https://example.org:65536/", "not a URL"),
    ("https://[::1/", "not a URL"),
    ("https://name:secret@example.org/m/", "user name"),
    ("https://example.org@evil.org/m/", "user name"),
    ("https://example.org/m?x=1", "no query"),
    ("https://example.org/m#x", "no fragment"),
    ("https://example.org/a b", "no space"),
    ("https://example.org/../m", "'..'"),
    ("https://example.org//m", "empty"),
    ("https://x/..%2f", "encoded"),
    ("https://x/%2e%2E/m", "encoded ones included"),
    ("https://x/%252e%252e/m", "encoded"),
    ("https://x/a%2Fb", "encoded '/'"),
    ("https://x/a%5cb", "backslash"),
    ("https://x/a\\b", "backslash"),
    ("https://x/a%0Ab", "control character"),
    ("https://x/a%00b", "control character"),
    ("https://x/a%ffb", "control character"),
    ("https://x/a%b", "bare '%'"),
    ("http://example.org/m/", "plain http"),
    ("http://localhost.example.org/m/", "plain http"),
)


@pytest.mark.parametrize("source", GOOD)
def test_what_is_allowed(source: str) -> None:
    assert check_source(source) == source


@pytest.mark.parametrize(("source", "why"), BAD)
def test_what_is_refused(source: str, why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        check_source(source)


@settings(max_examples=1000)
@given(
    st.sampled_from(["/", "https://h/", "hf://o/n@", "hf://"]),
    st.lists(st.sampled_from(["..", ".", "/", "a", "%2e", "%2F", "%25", "\n", "\\", "@", "?"]), max_size=8),
)
def test_nothing_that_is_allowed_leads_out_of_its_place(start: str, pieces: list[str]) -> None:
    source = start + "".join(pieces)
    try:
        check_source(source)
    except ValueError:
        return
    place = source if source.startswith("/") else unquote(unquote(urlsplit(source).path)).replace("\\", "/")
    assert ".." not in place.split("/")
    assert posixpath.normpath(place or "/") == (place.rstrip("/") or "/")
    assert source.isprintable()
