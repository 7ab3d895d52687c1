"""The manifest of a backup: what it holds, with checksums, and which releases made it."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ops.backup.programs import BackupError

FORMAT = 1
MANIFEST, DATABASE, FILES, KEYS = "manifest.json", "database.dump", "files", "keys.json"
_CHUNK_BYTES = 2**20


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A file of the backup."""

    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """`made_at`: by the database's clock, of the moment that the backup shows. `postgres`: the server's major version,
    `dumped_by`: that of pg_dump. `parts`: by path. `gone`: files that were deleted after that moment.
    """

    made_at: str
    tidepool: str | None
    schema: str
    postgres: int
    dumped_by: int
    system_identifier: str
    with_files: bool
    parts: dict[str, Part]
    gone: list[str] = []
    format: int = FORMAT

    @property
    def total_bytes(self) -> int:
        return sum(part.bytes for part in self.parts.values())


def measure(path: Path) -> Part:
    """Size and checksum of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return Part(bytes=path.stat().st_size, sha256=digest.hexdigest())


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Written last: a folder without it is no backup."""
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a backup.

    Raises:
        BackupError: there is none, or it is of another format.
    """
    path = folder / MANIFEST
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        raise BackupError(f"{folder} holds no backup: there is no {MANIFEST}") from None
    except msgspec.MsgspecError as error:
        raise BackupError(f"{path} cannot be read: {error}") from None
    if manifest.format != FORMAT:
        raise BackupError(f"{path} is of format {manifest.format}, this release reads {FORMAT}")
    outside = [name for name in manifest.parts if name not in {DATABASE, KEYS} and not _is_file(name)]
    if outside or DATABASE not in manifest.parts:
        raise BackupError(f"{path} names {outside[0]!r}" if outside else f"{path} names no {DATABASE}")
    return manifest


def file_parts(manifest: Manifest) -> list[str]:
    """The ids of the files that a backup holds."""
    return [name.partition("/")[2] for name in manifest.parts if _is_file(name)]


def _is_file(name: str) -> bool:
    folder, _, file_id = name.partition("/")
    return folder == FILES and file_id != "" and file_id.replace("-", "").isalnum()


def damaged(folder: Path, manifest: Manifest) -> Iterator[tuple[int, str | None]]:
    """Checks one part after the other: its bytes, and what is wrong with it; None: nothing is."""
    for name, part in manifest.parts.items():
        try:
            found = measure(folder / name)
        except OSError as error:
            yield part.bytes, f"{name}: {error.strerror}"
            continue
        yield part.bytes, None if found == part else f"{name} is not what was backed up ({found.bytes} bytes)"
