"""Exec a command tied to its parent's life, or as another user: `python privileges.py [options] -- argv`.

It runs as a plain script on the standard library alone, so that a child needs neither this package nor a `preexec_fn`
in a process with threads. Two uses, which nest in this order: `leashed` then `as_user`.

The hard place is Postgres under root. It refuses uid 0, yet its data and binaries often lie under a folder only root
may enter (`/root` is 0700). Opening that folder to everyone would be wrong, so the new user is given one capability
instead: CAP_DAC_READ_SEARCH (enter and read anything), or CAP_DAC_OVERRIDE where a container has dropped the first or a
binary is executable for root alone. It is given only if the user cannot reach the paths by itself. Capabilities of a
plain user survive exec only as *ambient* ones (capabilities(7)): keep the permitted set over setuid, make the one
capability inheritable, raise it. access(2), which initdb asks, ignores a plain user's capabilities unless the secure
bit NO_SETUID_FIXUP is set. The kernel forgets the parent-death signal on every change of credentials, hence it is read
before and set again last.
"""

import argparse
import ctypes
import os
import pwd
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

_CAP_DAC_OVERRIDE = 1
_CAP_DAC_READ_SEARCH = 2
_CAP_SETPCAP = 8
_LADDER = (_CAP_DAC_READ_SEARCH, _CAP_DAC_OVERRIDE)

_PR_SET_PDEATHSIG = 1
_PR_GET_PDEATHSIG = 2
_PR_SET_KEEPCAPS = 8
_PR_SET_SECUREBITS = 28
_SECBIT_NO_SETUID_FIXUP = 1 << 2
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_RAISE = 2
_CAPABILITY_VERSION_3 = 0x20080522

_SCRIPT = (sys.executable, "-I", "-S", str(Path(__file__).resolve()))


class PrivilegeError(Exception):
    """The command cannot be run as asked: no such user, out of its reach, or no right to change."""


class _CapHeader(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _CapData(ctypes.Structure):
    _fields_ = [
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    ]


def leashed(argv: Sequence[str], death_signal: signal.Signals) -> list[str]:
    """Argv that runs `argv` and has the kernel send it `death_signal` when the calling *thread* ends (Linux only)."""
    return [*_SCRIPT, "--parent", str(os.getpid()), "--death-signal", str(int(death_signal)), "--", *argv]


def as_user(argv: Sequence[str], user: str, reach: Sequence[Path]) -> list[str]:
    """Argv that runs `argv` as `user`, able to enter and read every path of `reach`. For root only."""
    paths = [word for path in reach for word in ("--reach", str(path))]
    return [*_SCRIPT, "--user", user, *paths, "--", *argv]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Parse the command line and become the command."""
    parser = argparse.ArgumentParser(prog="privileges", description="exec a command, leashed or as another user")
    parser.add_argument("--parent", type=int, help="pid whose end shall end the command")
    parser.add_argument("--death-signal", type=int, default=0)
    parser.add_argument("--user")
    parser.add_argument("--reach", action="append", default=[], help="a path the command must be able to read")
    parser.add_argument("argv", nargs="+")
    asked = parser.parse_args(arguments)
    parent = asked.parent or os.getppid()
    death_signal = asked.death_signal or _death_signal()
    try:
        if asked.user:
            _become(asked.user, asked.reach)
        _exec(asked.argv, parent, death_signal)
    except (PrivilegeError, OSError) as error:
        sys.exit(f"cannot run {asked.argv[0]}: {error}")


def _become(user: str, reach: Sequence[str]) -> None:
    """Switch to `user` for good, with no more privilege than `reach` needs."""
    try:
        entry = pwd.getpwnam(user)
    except KeyError:
        raise PrivilegeError(f"there is no user {user!r} on this machine") from None
    if entry.pw_uid == 0:
        raise PrivilegeError(f"{user!r} is root")
    if sys.platform == "linux":
        _prctl(_PR_SET_KEEPCAPS, 1)
    os.initgroups(user, entry.pw_gid)
    os.setgid(entry.pw_gid)
    os.setuid(entry.pw_uid)
    os.chdir("/")
    closed = _closed(reach)
    if closed and not (sys.platform == "linux" and _grant(reach)):
        raise PrivilegeError(
            f"user {user!r} cannot read {closed} and may not be granted that here; run Tidepool as a normal user, or "
            f"keep its home and its virtual environment where {user!r} can read"
        )


def _closed(reach: Sequence[str]) -> str | None:
    """The first path of `reach` that this process cannot enter and read."""
    return next((path for path in reach if not os.access(path, os.R_OK | os.X_OK)), None)


def _grant(reach: Sequence[str]) -> bool:
    """Take the least capability that opens every path of `reach`. False if none does, or none may be had."""
    if not _permitted(_CAP_SETPCAP):
        return False
    _set_capabilities(_CAP_SETPCAP, keep=(_CAP_SETPCAP, *_LADDER))
    _prctl(_PR_SET_SECUREBITS, _SECBIT_NO_SETUID_FIXUP)
    for capability in filter(_permitted, _LADDER):
        _set_capabilities(capability, keep=_LADDER)
        if not _closed(reach):
            _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, capability)
            return True
    return False


def _exec(argv: Sequence[str], parent: int, death_signal: int) -> NoReturn:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    if death_signal and sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, death_signal)
        if os.getppid() != parent:
            raise PrivilegeError(f"the parent {parent} has already ended")
    os.execvp(argv[0], list(argv))  # noqa: S606 - to become the command is this script's work


def _death_signal() -> int:
    """The parent-death signal set before this script was run; 0 for none."""
    if sys.platform != "linux":
        return 0
    number = ctypes.c_int(0)
    _libc_check(_libc().prctl(_PR_GET_PDEATHSIG, ctypes.byref(number), 0, 0, 0), "PR_GET_PDEATHSIG")
    return number.value


def _permitted(capability: int) -> bool:
    header, data = _CapHeader(_CAPABILITY_VERSION_3, 0), (_CapData * 2)()
    _libc_check(_libc().capget(ctypes.byref(header), ctypes.byref(data)), "capget")
    return bool(data[0].permitted >> capability & 1)


def _set_capabilities(capability: int, *, keep: Sequence[int]) -> None:
    """Make one capability effective and inheritable; of the permitted ones keep `keep`, drop all else."""
    kept = sum(1 << number for number in filter(_permitted, keep))
    header, data = _CapHeader(_CAPABILITY_VERSION_3, 0), (_CapData * 2)()
    data[0].effective, data[0].permitted, data[0].inheritable = 1 << capability, kept, 1 << capability
    _libc_check(_libc().capset(ctypes.byref(header), ctypes.byref(data)), "capset")


def _prctl(option: int, *values: int) -> None:
    padded = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
    _libc_check(_libc().prctl(option, *padded), f"prctl({option})")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _libc_check(result: int, call: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
