"""Headers of untrusted files: each inconsistency is refused before memory is allocated."""

import struct
from pathlib import Path

import pytest

pytest.importorskip("gguf", reason="install the gguf extra")

from ops.gguf.header import ARRAY_MAX, HEADER_BYTES_MAX, TENSORS_MAX, GgufError, read_header

MANY = 2**63


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str = "a", sides: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(sides)}QIQ", len(sides), *sides, kind, offset)


def gguf(*parts: bytes, version: int = 3, tensors: int = 0, fields: int = 0, data: int = 64) -> bytes:
    start = b"GGUF" + struct.pack("<IQQ", version, tensors, fields) + b"".join(parts)
    return start + bytes(-len(start) % 32 + data)


def test_a_header_is_read(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    fields = (
        entry("general.architecture", 8, text("llama")),
        entry("numbers", 9, struct.pack("<IQ3i", 5, 3, 1, -2, 3)),
        entry("texts", 9, struct.pack("<IQ", 8, 2) + text("é") + text("")),
        entry("yes", 7, b"\1"),
    )
    file.write_bytes(gguf(*fields, tensor("a", (32, 2), 8), tensor("b", (4,), 0, 68), tensors=2, fields=4, data=84))
    header = read_header(file)
    assert header.metadata == {
        "general.architecture": "llama",
        "numbers": [1, -2, 3],
        "texts": ["é", ""],
        "yes": True,
    }
    assert header.tensors["a"].shape == (2, 32)
    assert header.tensors["a"].size_bytes == 68
    assert header.tensors["b"].offset_bytes - header.tensors["a"].offset_bytes == 68


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is no readable GGUF file"),
        (b"PK\3\4" + bytes(60), "it does not begin with GGUF"),
        (gguf(version=1), "is of GGUF version 1"),
        (gguf(version=3 << 24), "is of GGUF version 50331648"),
        (gguf(tensors=MANY), f"the limit is {TENSORS_MAX}"),
        (gguf(fields=MANY, data=0), "its header exceeds its end"),
        (gguf(struct.pack("<Q", MANY), fields=1), "has a name of 9223372036854775808 bytes"),
        (gguf(entry("a", 8, struct.pack("<Q", MANY)), fields=1), "has a name of|exceeds its end"),
        (gguf(entry("a", 9, struct.pack("<IQ", 4, MANY)), fields=1), f"the limit is {ARRAY_MAX}"),
        (gguf(entry("a", 9, struct.pack("<IQ", 8, ARRAY_MAX)), fields=1), "exceeds its end"),
        (gguf(entry("a", 9, struct.pack("<IQ", 9, 1)), fields=1), "a value of the unknown type 9"),
        (gguf(entry("a", 77, b""), fields=1), "a value of the unknown type 77"),
        (gguf(entry("a", 7, b"\1") * 2, fields=2), "has a twice"),
        (gguf(entry("a", 8, struct.pack("<Q", 1) + b"\xff"), fields=1), "is no readable GGUF file"),
        (gguf(entry("split.count", 2, struct.pack("<H", 3)), fields=1), "is one of 3 parts"),
        (gguf(entry("general.alignment", 4, struct.pack("<I", 0)), fields=1), "must be a power of two"),
        (gguf(tensor(sides=()), tensors=1), "has 0 dimensions"),
        (gguf(tensor(sides=(1,) * 9), tensors=1), "has 9 dimensions"),
        (gguf(tensor(kind=999), tensors=1), "is of the unknown type 999"),
        (gguf(tensor(sides=(31,), kind=8), tensors=1), "does not consist of Q8_0 blocks"),
        (gguf(tensor(sides=(0,)), tensors=1), "does not consist of F32 blocks"),
        (gguf(tensor(sides=(MANY, MANY)), tensors=1), "is cut short: tensor a ends at byte"),
        (gguf(tensor(offset=2**40), tensors=1), "is cut short: tensor a ends at byte"),
        (gguf(tensor(), tensor(), tensors=2), "has the tensor a twice"),
    ],
)
def test_an_inconsistent_header_is_refused(content: bytes, words: str, tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(content)
    with pytest.raises(GgufError, match=words):
        read_header(file)


def test_a_header_has_an_end_in_a_file_of_any_size(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(gguf(entry("a", 8, struct.pack("<Q", HEADER_BYTES_MAX)), fields=1))
    with file.open("r+b") as sparse:
        sparse.truncate(2**36)
    with pytest.raises(GgufError, match=f"the limit of {HEADER_BYTES_MAX} bytes"):
        read_header(file)


def test_no_file_and_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(GgufError, match="is no readable GGUF file"):
            read_header(path)
