"""Machines of a test: network namespaces on one switch, each with a shell that keeps what is exported in it; and the
lines of `ops/docs/deploy.md`, to be typed there.
"""

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from ops.local.embedded import EmbeddedPostgres, EmbeddedValkey

ROOT = Path(__file__).parents[2]
QUICK = {"TIDEPOOL_SCALE_EVERY_S": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
SERVERS = """
import time
from pathlib import Path
from ops.local.embedded import EmbeddedPostgres, EmbeddedValkey
postgres, valkey = EmbeddedPostgres(Path({home!r}), 5432), EmbeddedValkey(Path({home!r}), 6379)
while not (postgres.ping() and valkey.ping()):
    time.sleep(0.1)
postgres.ensure_database()
"""
STOP_S = 20.0
_DIED = "the shell of this machine has ended"


def ip(*words: str) -> str:
    """Run `ip`."""
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=60).stdout


def why_not() -> str | None:
    """Why this machine cannot have network namespaces; None: it can."""
    name = f"tp-{os.getpid()}-try"
    try:
        ip("netns", "add", name)
    except FileNotFoundError:
        return "needs the command `ip`"
    except subprocess.CalledProcessError as error:
        return f"may not make network namespaces: {error.stderr.strip()}"
    try:
        ip("-n", name, "link", "add", "one", "type", "veth", "peer", "name", "two")
        ip("-n", name, "link", "add", "bridge", "type", "bridge")
    except subprocess.CalledProcessError as error:
        return f"has no virtual ethernet or bridge: {error.stderr.strip()}"
    finally:
        ip("netns", "del", name)
    return None


class Machine:
    """A network namespace, and a shell in it. `folder` is its working folder; `log` is where its errors go."""

    def __init__(self, namespace: str, folder: Path, environment: Mapping[str, str], log: Path) -> None:
        self.namespace = namespace
        self.log = log
        self._folder = folder
        self._environment = dict(environment)
        self._begun: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        self._shell = self.begin("bash", "-e")
        self.run(f"trap 'echo; echo {_DIED}' EXIT")
        return self

    def begin(self, *argv: str) -> subprocess.Popen[str]:
        """Start a program on this machine."""
        with self.log.open("a") as log:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, *argv],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if argv[0] == "bash" else log,
                stderr=log,
                text=True,
                cwd=self._folder,
                env=self._environment,
                start_new_session=True,
            )
        self._begun.append(process)
        return process

    def adopt(self, process: subprocess.Popen[str]) -> None:
        """Wait for a program at the end that another began here."""
        self._begun.append(process)

    def run(self, lines: str) -> str:
        """Run lines in the shell, to their end; what they printed."""
        end = f"end-{uuid.uuid4().hex}"
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        self._shell.stdin.write(f"{lines}\necho; echo {end}\n")
        self._shell.stdin.flush()
        printed = []
        for line in self._shell.stdout:
            if line.strip() == end:
                return "".join(printed)
            if line.strip() == _DIED:  # its output may stay open: what it started runs on
                break
            printed.append(line)
        raise AssertionError(f"{self.namespace} failed:\n{lines}\n{''.join(printed)}\n{self.log.read_text()[-4000:]}")

    def listeners(self) -> set[int]:
        """The TCP ports that are open to other machines."""
        rows = self._ss().splitlines()
        places = [row.split()[3].rsplit(":", 1) for row in rows]
        return {int(port) for address, port in places if not re.match(r"127\.|\[?::1\]?|\[::ffff:127\.", address)}

    def _ss(self) -> str:
        argv = ["ip", "netns", "exec", self.namespace, "ss", "-Hltn"]
        return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60).stdout

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End what runs on this machine: it has only what the test started."""
        self._signal(signal.SIGTERM)
        deadline_s = time.monotonic() + STOP_S
        while self._pids() and time.monotonic() < deadline_s:
            for process in self._begun:
                process.poll()
            time.sleep(0.1)
        self._signal(signal.SIGKILL)
        for process in self._begun:
            process.wait(STOP_S)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def _pids(self) -> list[int]:
        return [int(pid) for pid in ip("netns", "pids", self.namespace).split()]

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pids():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue


@contextmanager
def wired(addresses: Sequence[str]) -> Iterator[dict[str, str]]:
    """A namespace for each address, all on one switch that has a namespace too; their names by address. Nothing of it
    is connected to the machine that the test runs on.
    """
    prefix = f"tp-{os.getpid()}"
    switch, made = f"{prefix}-switch", []
    try:
        ip("netns", "add", switch)
        made.append(switch)
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for index, address in enumerate(addresses):
            name = f"{prefix}-{index}"
            ip("netns", "add", name)
            made.append(name)
            ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", f"port{index}", "netns", switch)
            ip("-n", switch, "link", "set", f"port{index}", "master", "bridge", "up")
            ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                ip("-n", name, "link", "set", link, "up")
        yield {address: f"{prefix}-{index}" for index, address in enumerate(addresses)}
    finally:
        for name in made:
            ip("netns", "del", name)


def documented_lines(title: str) -> list[tuple[str, str]]:
    """The lines of a section of `ops/docs/deploy.md`: on which machine, and what is typed there."""
    _, _, section = (ROOT / "ops" / "docs" / "deploy.md").read_text().partition(f"## {title}\n")
    section = re.split(r"^##", section, maxsplit=1, flags=re.MULTILINE)[0]
    return re.findall(r"```sh\n# (\S+?)(?::.*?)?\n(.*?)```", section, flags=re.DOTALL)


def filled(lines: str, words: Mapping[str, str]) -> str:
    """Lines with their placeholders replaced."""
    for word, value in words.items():
        lines = re.sub(rf"\b{word}\b(?!,)", lambda _, value=value: value, lines)  # type: ignore[misc]
    return lines


def environment(folder: Path) -> dict[str, str]:
    """What processes on these machines inherit: `tidepool` on the PATH, loops that turn quickly, logs as JSON."""
    program = folder / "bin" / "tidepool"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m ops.cli.main "$@"\n')
    program.chmod(0o755)
    mine = {name: value for name, value in os.environ.items() if not name.startswith("TIDEPOOL_")}
    paths = {"PYTHONPATH": str(ROOT), "PATH": f"{program.parent}:{os.environ['PATH']}"}
    return mine | QUICK | paths | {"TIDEPOOL_LOG_FORMAT": "json"}


def start_servers(machine: Machine, home: Path) -> None:
    """PostgreSQL and Redis that listen on the machine's address too, as an operator's own would."""
    postgres, valkey = EmbeddedPostgres(home, 5432, fsync=False), EmbeddedValkey(home, 6379)
    postgres.prepare()
    valkey.prepare()
    with (postgres.data / "pg_hba.conf").open("a") as rules:
        rules.write("host all all 10.77.0.0/24 scram-sha-256\n")
    logs = Machine(machine.namespace, home, dict(os.environ), home / "servers.log")
    machine.adopt(logs.begin(*postgres.command(), "-c", "listen_addresses=*"))
    machine.adopt(logs.begin(*valkey.command(), "--bind", "0.0.0.0"))
    machine.run(f"{sys.executable} - <<'END'\n{SERVERS.format(home=str(home))}END")
