"""The blob store of an installation."""

from pathlib import Path

from controlplane.errors import InvalidValueError
from controlplane.settings import Settings
from controlplane.store.blobs.base import BlobStore
from controlplane.store.blobs.folder import FolderBlobs
from controlplane.store.blobs.mirrored import MirroredBlobs

_FOLDER = "file://"


def open_blobs(settings: Settings) -> BlobStore:
    """The folder `files` in the home of Tidepool, or the bucket of `files_url`; with a second store where
    `files_copy_url` names one.

    Raises:
        InvalidValueError: a bucket is named, but the extra `s3` is not installed.
    """
    home = settings.with_home()
    near = (
        FolderBlobs(home / "files")
        if settings.files_url is None
        else _bucket(settings.files_url, home / "drafts", "files_url")
    )
    copy = settings.files_copy_url
    if copy is None:
        return near
    far = (
        FolderBlobs(Path(copy.removeprefix(_FOLDER)))
        if copy.startswith(_FOLDER)
        else _bucket(
            copy,
            home / "drafts",
            "files_copy_url",
            endpoint=settings.files_copy_endpoint,
            region=settings.files_copy_region,
        )
    )
    return MirroredBlobs(near, far, at_once=settings.files_copy_at_once)


def _bucket(
    url: str, drafts: Path, setting: str, *, endpoint: str | None = None, region: str | None = None
) -> BlobStore:
    try:
        from controlplane.store.blobs.bucket import BucketBlobs  # noqa: PLC0415 - an extra
    except ImportError as error:
        message = f"{setting} is set, which needs the extra: pip install tidepool[s3]"
        raise InvalidValueError(message, param=setting) from error
    return BucketBlobs(url, drafts=drafts, endpoint=endpoint, region=region)
