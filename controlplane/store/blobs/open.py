"""The blob store of an installation."""

from controlplane.errors import InvalidValueError
from controlplane.settings import Settings
from controlplane.store.blobs.base import BlobStore
from controlplane.store.blobs.folder import FolderBlobs


def open_blobs(settings: Settings) -> BlobStore:
    """The folder `files` in the home of Tidepool, or the bucket of `files_url`.

    Raises:
        InvalidValueError: `files_url` is set, but the extra `s3` is not installed.
    """
    if settings.files_url is None:
        return FolderBlobs(settings.with_home() / "files")
    try:
        from controlplane.store.blobs.bucket import BucketBlobs  # noqa: PLC0415 - an extra
    except ImportError as error:
        message = "files_url is set, which needs the extra: pip install tidepool[s3]"
        raise InvalidValueError(message, param="files_url") from error
    return BucketBlobs(settings.files_url, drafts=settings.with_home() / "drafts")
