"""`tidepool` against a running API: what it shows, what it prints for scripts, and how it fails."""

import gzip
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import typer
import uvicorn

from controlplane.api.app import make_app
from controlplane.policies.lifecycle import InstanceState
from controlplane.settings import Settings
from controlplane.store.instances import add_instance, set_desired
from controlplane.store.joining import join_node
from controlplane.store.keys import make_key
from controlplane.store.request_log import RequestRecord, write_requests
from controlplane.store.session import Database, make_engine
from controlplane.store.tables import Desired, EndpointRow, Instance, Role
from controlplane.store.usage import Usage, UsageKey, put_usage
from dataplane.protocol.messages import Join, SlotSpec
from ops.cli import deletes
from ops.cli.command_table import LazyCommand
from ops.cli.main import app, main
from tests.dataplane.registry import Registry
from tests.ops.local.test_checkpoints import write_checkpoint

PROFILES = Path(__file__).parents[3] / "ops" / "profiles"
WAIT_S = 30.0
Run = Callable[..., "Outcome"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """`run("region", "list")`: a command in this process, with a wide screen and an empty home."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TIDEPOOL_HOME", str(tmp_path))
    for name in ("TIDEPOOL_URL", "TIDEPOOL_PORT", "TIDEPOOL_HOST", "TIDEPOOL_KEY", "TIDEPOOL_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: object) -> Outcome:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Outcome(status=int(ended.value.code or 0), out=captured.out, err=captured.err)

    return run


@pytest.fixture
def database(settings: Settings) -> Iterator[Database]:
    database = Database(make_engine(settings))
    yield database
    database.close()


@pytest.fixture
def served(settings: Settings, database: Database, run: Run, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """`run` with a real API behind it; its admin key is in the home's keys.json."""
    with database.transaction() as session:
        secret = make_key(session, name="admin", role=Role.ADMIN, tenant="default").secret
    (settings.home / "keys.json").write_text(json.dumps({"admin": secret}))
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(make_app(settings), log_level="error", access_log=False))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    deadline_s = time.monotonic() + WAIT_S
    while not server.started and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert server.started
    monkeypatch.setenv("TIDEPOOL_URL", f"http://127.0.0.1:{listener.getsockname()[1]}")
    yield run
    server.should_exit = True
    thread.join(WAIT_S)
    listener.close()


def _commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, listed in getattr(group, "commands", {}).items():
        command = listed.load() if isinstance(listed, LazyCommand) else listed
        yield (*path, name)
        yield from _commands(command, (*path, name))


COMMANDS = tuple(_commands(typer.main.get_command(app)))
GROUPS = {path[0] for path in COMMANDS if len(path) == 2}


def test_every_command_explains_itself_with_an_example(run: Run) -> None:
    assert {"up", "demo", "api", "dispatcher", "worker", "forecaster", "beat", "agent", "migrate", "status"} <= {
        c[0] for c in COMMANDS
    }
    for path in COMMANDS:
        outcome = run(*path, "--help")
        assert outcome.status == 0, path
        if path != (path[0],) or path[0] not in GROUPS:
            assert f"tidepool {' '.join(path)}" in outcome.out.replace("Usage: ", "", 1).split("\n", 1)[1], path
        if len(path) == 2 or path == ("status",):
            assert "--json" in outcome.out, path


def test_the_table_says_what_the_modules_define() -> None:
    for name, listed in typer.main.get_command(app).commands.items():
        assert isinstance(listed, LazyCommand)
        command = listed.load()
        assert (command.name, command.hidden) == (name, False)
        assert listed.help == command.get_short_help_str(1000), f"{name}: its line in `tidepool --help`"


HEAVY = ("torch", "sqlalchemy", "celery", "pandas", "numpy", "matplotlib", "pydantic", "msgspec", "structlog", "rich")


@pytest.mark.parametrize(("command", "unused"), [("--help", (*HEAVY, "httpx2", "ssl")), ("status", HEAVY)])
def test_a_command_imports_only_what_it_needs(command: str, unused: tuple[str, ...]) -> None:
    watched = (
        "import atexit, sys\nfrom ops.cli.main import main\n"
        f"atexit.register(lambda: print([name for name in {unused} if name in sys.modules]))\n"
        f"main({command.split()})"
    )
    environment = os.environ | {"TIDEPOOL_URL": "http://127.0.0.1:1", "TIDEPOOL_ADMIN_KEY": "x"}
    ended = subprocess.run(
        [sys.executable, "-c", watched], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == (1 if command == "status" else 0), ended.stderr
    assert ended.stdout.splitlines()[-1] == "[]"


def test_failures_are_one_line(run: Run, tmp_path: Path) -> None:
    outcome = run("region", "list")
    assert outcome.status == 1
    assert outcome.err.startswith("error: no key")
    assert outcome.err.count("\n") == 1
    (tmp_path / "keys.json").write_text("{}")
    assert "holds no admin key" in run("status").err
    refused = run("--key", "x", "--url", "http://127.0.0.1:1", "status")
    assert refused.status == 1
    assert "cannot be reached" in refused.err
    assert refused.err.count("\n") == 1


def test_wrong_use_is_2(run: Run, tmp_path: Path) -> None:
    for arguments in (
        ("frob",),
        ("region", "add"),
        ("region", "add", "a", "--position", "x"),
        ("demand", "import", "/x"),
    ):
        outcome = run(*arguments)
        assert outcome.status == 2, arguments
        assert "Usage:" in outcome.err
    folder = write_checkpoint(tmp_path / "m")
    for rate in ("H800", "H800=", "=3", "H800=-1", "H800=nan"):
        assert run("model", "add", "m", "--path", folder, "--tokens-per-s", rate).status == 2, rate
    assert run("model", "add", "m", "--path", folder, "--min", 3, "--max", 2).status == 2


def test_latency_comes_from_gpu_profiles(served: Run, tmp_path: Path) -> None:
    served("gpu", "add", "H800", "--memory-gib", 80, "--cost-per-hour", 2.5)
    folder, rate = write_checkpoint(tmp_path / "m"), ("--tokens-per-s", "H800=1200")
    made = served("model", "add", "m", "--path", folder, *rate, "--latency", PROFILES / "h800.toml", "--json").json
    [profile] = made["profiles"]
    assert profile["latency"]["source"].startswith("7B on 1 H800: profiles/")
    assert profile["latency"]["decode_base_s"] == pytest.approx(8.4524e-03)
    assert profile["latency"]["switch_s"] == pytest.approx(96 / (55.6e9 * 0.625)), "its own 96 bytes, not the 7B's"
    assert "7B on 1 H800" in served("model", "show", "m").out
    assert served("model", "profile", "m", *rate, "--json").json[0]["latency"] is None
    assert "never pooled" in served("model", "show", "m").out
    refused = served("model", "profile", "m", *rate, "--latency", PROFILES / "h20.toml")
    assert (refused.status, "is of H20" in refused.err) == (2, True)
    (tmp_path / "bad.toml").write_text((PROFILES / "h800.toml").read_text().replace("8.4524e-03", "-1.0"))
    broken = served("model", "profile", "m", *rate, "--latency", tmp_path / "bad.toml")
    assert broken.status == 1
    assert "models[0]: decode_base_s must be at least 0" in broken.err


def test_engine_rates_are_kept_with_the_profile(served: Run, tmp_path: Path) -> None:
    served("gpu", "add", "H800", "--memory-gib", 80, "--cost-per-hour", 2.5)
    folder, rate = write_checkpoint(tmp_path / "m"), ("--tokens-per-s", "H800=1200")
    assert served("model", "add", "m", "--path", folder, *rate, "--engine-rates", "H800=9000,15000").status == 0
    assert "torch 9000, vLLM 15000 tokens/s" in served("model", "show", "m").out
    assert "engines: not measured" in served("model", "profile", "m", *rate).out
    for wrong in ("H800", "H800=1", "H800=1,2,3", "H800=1,0", "H20=1,2"):
        refused = served("model", "profile", "m", *rate, "--engine-rates", wrong)
        assert (refused.status, "--engine-rates" in refused.err) == (2, True), wrong


def test_a_fleet_is_registered_and_listed(served: Run, tmp_path: Path, database: Database) -> None:
    assert served("region", "add", "us-east").status == 0
    assert served("region", "add", "us-west", "--json").json["position"] == 1
    assert "us-west" in served("region", "list").out
    assert served("gpu", "add", "H800", "--memory-gib", 80, "--cost-per-hour", 2.5).status == 0
    assert "80 GiB" in served("gpu", "list").out
    folder = write_checkpoint(tmp_path / "tiny")
    made = served(
        *("model", "add", "org/tiny", "--path", folder, "--tokens-per-s", "H800=1200", "--json"),
        *("--region", "us-east", "--region", "us-west", "--max", 3),
    ).json
    assert made["model"]["weights_bytes"] == 96
    assert [profile["tokens_per_s"] for profile in made["profiles"]] == [1200]
    assert [endpoint["region"] for endpoint in made["endpoints"]] == ["us-east", "us-west"]
    assert "LlamaForCausalLM" in served("model", "show", "org/tiny").out
    assert served("endpoint", "set", "org/tiny", "us-east", "--min", 1, "--max", 2, "--json").json["instances_max"] == 2
    assert [row["instances_max"] for row in served("endpoint", "list", "--json").json["data"]] == [2, 3]
    slots = (SlotSpec(gpus=8, memory_bytes=2**30), SlotSpec(gpus=8, memory_bytes=2**30, workers=8))
    with database.transaction() as session:
        url = "http://127.0.0.1:1"
        join = Join(node="n-1", region="us-east", gpu_type="H800", url=url, slots=slots, engine="replay")
        join_node(session, join)
    assert "draining" in served("node", "drain", "n-1").out
    assert served("node", "show", "n-1", "--json").json["draining"] is True
    assert "8 GPUs with 1 GiB, 8 GPUs in 8 workers with 1 GiB" in served("node", "show", "n-1").out
    assert served("node", "undrain", "n-1", "--json").json["draining"] is False
    assert "n-1" in served("node", "list").out
    assert served("instance", "list", "--json").json["data"] == []
    status = served("status").out
    assert "0 of 1" in status
    assert served("status", "--json").json["models"] == 1


def test_what_is_used_is_not_deleted_and_drain_empties_it_first(
    served: Run, tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    served("region", "add", "us-east")
    served("gpu", "add", "H800", "--memory-gib", 80, "--cost-per-hour", 2.5)
    folder = write_checkpoint(tmp_path / "tiny")
    served("model", "add", "org/tiny", "--path", folder, "--tokens-per-s", "H800=1200", "--region", "us-east")
    slots = (SlotSpec(gpus=8, memory_bytes=2**30),)
    join = Join(node="n-1", region="us-east", gpu_type="H800", url="http://127.0.0.1:1", slots=slots, engine="replay")
    place = {"model": "org/tiny", "region": "us-east", "gpu_type": "H800", "node": "n-1"}
    with database.transaction() as session:
        join_node(session, join)
        instance_id = add_instance(session, **place, slot=0, gpus=1).id
    for words, what in (
        (f"1 x instance ({instance_id})", ("endpoint", "delete", "org/tiny", "us-east")),
        ("1 x endpoint (us-east)", ("model", "delete", "org/tiny")),
        ("1 x node (n-1)", ("gpu", "delete", "H800")),
        ("1 x node (n-1)", ("region", "delete", "us-east")),
        (f"1 x instance ({instance_id})", ("node", "delete", "n-1")),
    ):
        refused = served(*what)
        assert (refused.status, words in refused.err) == (1, True), refused.err

    def drained(_: float) -> None:
        """What scaling and the node do meanwhile."""
        with database.transaction() as session:
            assert session.get_one(EndpointRow, ("org/tiny", "us-east")).instances_max == 0
            set_desired(session, [instance_id], Desired.STOPPED)

    monkeypatch.setattr(deletes, "sleep", drained)
    gone = served("model", "delete", "org/tiny", "--drain")
    assert (gone.out, gone.err) == ("model org/tiny is deleted\n", "org/tiny in us-east: 1 instance left\n")
    assert "is not registered" in served("model", "delete", "org/tiny").err
    assert served("node", "delete", "n-1", "--drain", "--json").json["name"] == "n-1"
    assert served("gpu", "delete", "H800").out == "GPU type H800 is deleted\n"
    assert served("region", "delete", "us-east").out == "region us-east is deleted\n"
    assert served("status", "--json").json["regions"] == []


def test_refusals_name_the_field_and_make_nothing(served: Run, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny")
    outcome = served("model", "add", "m", "--path", folder, "--region", "mars")
    assert outcome.status == 1
    assert outcome.err == "error: region 'mars' is not registered (404)\n"
    assert outcome.out == ""
    assert served("model", "list", "--json").json["data"] == []
    outcome = served("model", "add", "m", "--path", tmp_path / "none")
    assert (outcome.status, "is no folder" in outcome.err) == (1, True)
    assert "name:" in served("region", "add", "US").err
    assert "(401)" in served("--key", "wrong", "region", "list").err


def test_a_model_is_added_with_a_rate_or_has_a_profile_already(served: Run, tmp_path: Path) -> None:
    served("gpu", "add", "H800", "--memory-gib", 80, "--cost-per-hour", 2.5)
    folder = write_checkpoint(tmp_path / "tiny")
    outcome = served("model", "add", "m", "--path", folder)
    assert outcome.status == 1
    assert "--tokens-per-s GPU=NUMBER is missing, and m has no profile yet" in outcome.err
    assert "tidepool node profile" in outcome.err
    assert served("model", "list", "--json").json["data"] == []
    served("model", "add", "m", "--path", folder, "--tokens-per-s", "H800=1200")
    again = served("model", "add", "m", "--path", folder, "--slo", "IW-F=0.5,0.05")
    assert (again.status, "profiles: H800" in again.out) == (0, True)


def test_a_model_may_lie_in_a_registry(served: Run, tmp_path: Path) -> None:
    served("gpu", "add", "H800", "--memory-gib", 80, "--cost-per-hour", 2.5)
    registry = Registry.of(write_checkpoint(tmp_path / "tiny"))
    given = ("--path", registry.url, "--tokens-per-s", "H800=1200", "--private-host", "127.0.0.1")
    made = served("model", "add", "m", *given, "--json").json
    assert (made["model"]["path"], made["model"]["weights_bytes"]) == (registry.url, 96)
    registry.answers = [404]
    outcome = served("model", "add", "m", *given)
    assert (outcome.status, outcome.err) == (1, f"error: {registry.url}manifest.json answers 404\n")
    registry.close()


def test_keys_that_may_do_less_and_rotation(served: Run) -> None:
    narrow = ("--scope", "files", "--scope", "models", "--model", "a", "--model", "b")
    made = served("key", "create", "nightly", *narrow, "--json").json
    assert (made["scopes"], made["models"]) == (["files", "models"], ["a", "b"])
    assert "files, models" in served("key", "list").out
    node = served("key", "create", "n7", "--role", "node", "--node", "node-7", "--json").json
    assert node["node"] == "node-7"
    assert "only keys of the role" in served("key", "create", "n8", "--node", "node-8").err
    rotated = served("key", "rotate", made["id"], "--overlap", "2d")
    assert rotated.out.strip() != made["secret"]
    assert "the old secret works until" in rotated.err
    row = next(row for row in served("key", "list", "--json").json["data"] if row["id"] == made["id"])
    assert row["prefix"] == rotated.out[:14]
    for wrong in ("", "1", "h", "1.5h", "-1h", "1w", "\u0663h"):
        refused = served("key", "rotate", made["id"], "--overlap", wrong)
        assert refused.status == 2, wrong


def test_tenants(served: Run) -> None:
    assert "default limits" in served("tenant", "show", "team-a").out
    set_up = ("tenant", "set", "team-a", "--requests-per-minute", 600, "--concurrent-max", 5, "--json")
    assert served(*set_up).json["requests_per_minute"] == 600
    changed = served("tenant", "set", "team-a", "--concurrent-max", "none", "--tokens-per-minute", 1000, "--json").json
    limits = {name: changed[name] for name in ("requests_per_minute", "tokens_per_minute", "concurrent_max")}
    assert limits == {"requests_per_minute": 600, "tokens_per_minute": 1000, "concurrent_max": None}
    assert "600" in served("tenant", "show", "team-a").out
    assert [row["name"] for row in served("tenant", "list", "--json").json["data"]] == ["team-a"]
    assert served("tenant", "set", "team-a", "--concurrent-max", "many").status == 2
    assert "(400)" in served("tenant", "set", "team-a", "--concurrent-max", "0").err
    assert "default limits" in served("tenant", "reset", "team-a").out
    assert served("tenant", "show", "team-a", "--json").json["is_default"] is True


def test_keys(served: Run) -> None:
    made = served("key", "create", "ci", "--role", "viewer")
    secret = made.out.strip()
    assert served("--key", secret, "region", "list").status == 0
    assert "(403)" in served("--key", secret, "region", "add", "a").err
    rows = served("key", "list", "--json").json["data"]
    assert [row["name"] for row in rows] == ["admin", "ci"]
    assert secret not in served("key", "list").out
    assert served("key", "revoke", rows[1]["id"], "--json").json["revoked_at"]
    assert "(409)" in served("key", "revoke", rows[0]["id"]).err


def test_demand(served: Run, tmp_path: Path) -> None:
    served("region", "add", "us-east")
    served("gpu", "add", "H800", "--memory-gib", 80, "--cost-per-hour", 2.5)
    served("model", "add", "m", "--path", write_checkpoint(tmp_path / "tiny"), "--tokens-per-s", "H800=1200")
    lines = ["start_s,region,model,tokens_per_s", *(f"{60 * i},us-east,m,{i}" for i in range(120))]
    plain, packed = tmp_path / "week.csv", tmp_path / "week.csv.gz"
    plain.write_text("\n".join(lines))
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert "120 minutes of 1 endpoints" in served("demand", "import", plain).out
    assert served("demand", "import", packed, "--json").json["rows"] == 120
    shown = served("demand", "show", "m", "us-east").out
    assert "89.5" in shown
    assert "119" in shown
    assert len(served("demand", "show", "m", "us-east", "--since-s", 60, "--json").json["data"]) == 119
    plain.write_text(plain.read_text() + "\n61,us-east,m,1")
    assert served("demand", "import", plain).err.endswith(
        "error: line 122: start_s: must be a multiple of 60, is 61 (400)\n"
    )
    packed.write_bytes(packed.read_bytes()[:-9])
    assert "cannot be read" in served("demand", "import", packed).err
    assert "none" in served("forecast", "list").out


def test_the_audit_is_filtered(served: Run) -> None:
    served("region", "add", "us-east")
    served("region", "add", "us-west")
    served("gpu", "add", "H800", "--memory-gib", 80, "--cost-per-hour", 2.5)
    served("region", "add", "us-east", "--position", 7)

    def subjects(*options: object) -> list[str]:
        return [row["subject"] for row in served("audit", *options, "--json").json["data"]]

    assert subjects() == ["us-east", "H800", "us-west", "us-east"]
    assert subjects("--kind", "region") == ["us-east", "us-west", "us-east"]
    assert subjects("--subject", "us-west", "--actor", "admin", "--since", "1h") == ["us-west"]
    assert subjects("--limit", 2) == ["us-east", "H800"]
    assert subjects("--actor", "nobody") == subjects("--since", "2999-01-01") == []
    shown = served("audit", "--kind", "region", "--limit", 1).out
    assert "region.put" in shown
    assert "position 0 -> 7" in shown
    assert served("audit", "--since", "noon").status == 2


def test_events_tell_what_became_of_nodes(served: Run, database: Database) -> None:
    served("region", "add", "us-east")
    served("gpu", "add", "H800", "--memory-gib", 80, "--cost-per-hour", 2.5)
    slots = (SlotSpec(gpus=8, memory_bytes=2**30),)
    with database.transaction() as session:
        for name in ("n-1", "n-2"):
            url = "http://127.0.0.1:1"
            join = Join(node=name, region="us-east", gpu_type="H800", url=url, slots=slots, engine="replay")
            join_node(session, join)
    served("node", "drain", "n-1")

    def what(*options: object) -> list[str]:
        return [f"{row['subject']} {row['what']}" for row in served("events", *options, "--json").json["data"]]

    assert what() == ["n-1 draining", "n-2 joined", "n-1 joined"]
    assert what("--node", "n-1", "--what", "joined") == ["n-1 joined"]
    assert what("--kind", "plan") == what("--since", "2999-01-01") == []
    assert "H800 at http://127.0.0.1:1" in served("events", "--subject", "n-2").out


def test_usage_is_added_up(served: Run, database: Database) -> None:
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    with database.transaction() as session:
        counts = {
            UsageKey(hour - timedelta(hours=back), tenant, "m", "IW-N"): Usage(requests=1000, output_tokens=back)
            for back in range(3)
            for tenant in ("acme", "blue")
        }
        put_usage(session, "x", counts)
    rows = served("usage", "--by", "tenant", "--json").json["data"]
    assert [(row["tenant"], row["requests"], row["output_tokens"]) for row in rows] == [
        ("acme", 3000, 3),
        ("blue", 3000, 3),
    ]
    assert len(served("usage", "--by", "hour", "--tenant", "acme", "--limit", 2, "--json").json["data"]) == 2
    shown = served("usage", "--since", "1d", "--by", "hour", "--by", "tenant").out
    assert f"{hour:%Y-%m-%d %H:%M}" in shown
    assert "1,000" in shown
    assert served("usage", "--since", "2999-01-01").out == "Usage: none\n"


def test_batches(served: Run, tmp_path: Path) -> None:
    served("gpu", "add", "H800", "--memory-gib", 80, "--cost-per-hour", 2.5)
    served("model", "add", "m", "--path", write_checkpoint(tmp_path / "tiny"), "--tokens-per-s", "H800=1200")
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    file = tmp_path / "requests.jsonl"
    request = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    file.write_text(json.dumps(request) + "\n")
    batch = served("batch", "submit", file, "--no-watch", "--json").json
    assert batch["status"] == "validating"
    assert batch["id"] in served("batch", "list").out
    for given in (batch["id"], batch["id"][:-1], "latest"):
        assert served("batch", "show", given, "--json").json["id"] == batch["id"], given
    assert "has no output file" in served("batch", "output", batch["id"]).err
    assert served("batch", "cancel", batch["id"], "--json").json["status"] in {"cancelling", "cancelled"}
    file.write_text("{}\n")
    assert "url" in served("batch", "submit", file).err
    file.write_text("no json\n")
    assert "line 1" in served("batch", "submit", file).err


def test_plans_of_an_empty_fleet(served: Run) -> None:
    assert served("plan", "list", "--json").json["data"] == []
    assert "(404)" in served("plan", "show", "plan_0").err
    assert "(404)" in served("plan", "apply", "plan_0", "--index", 1).err
    for act in ("approve", "reject", "rollback"):
        assert "(404)" in served("plan", act, "plan_0").err
    assert "last planned" in served("status").out


def test_a_plan_is_explained_drawn_and_rolled_back(served: Run, tmp_path: Path) -> None:
    served("region", "add", "us-east")
    served("gpu", "add", "H800", "--memory-gib", 80, "--cost-per-hour", 2.5)
    folder = write_checkpoint(tmp_path / "tiny")
    served("model", "add", "m", "--path", folder, "--tokens-per-s", "H800=1200", "--region", "us-east")
    minute_s = int(time.time()) // 60 * 60
    lines = ["start_s,region,model,tokens_per_s", *(f"{minute_s - 60 * n},us-east,m,{n}" for n in range(1, 90))]
    (tmp_path / "day.csv").write_text("\n".join(lines))
    served("demand", "import", tmp_path / "day.csv")
    made = [served("plan", "create", "--json").json["plan"]["id"]]
    assert "(409)" in served("plan", "rollback", made[0]).err
    assert served("plan", "show", "latest", "--json").json["plan"]["id"] == made[0]
    assert "no plan is in force" in served("plan", "show", "current").err
    assert served("plan", "approve", made[0][:-1]).out == f"plan {made[0]} is in force\n"
    assert served("plan", "show", "current", "--json").json["plan"]["id"] == made[0]
    assert "m in all" in served("plan", "show", "--explain", made[0].removeprefix("plan_")).out
    assert "Changes: none" in served("plan", "show", "latest", "--changes-only").out
    told = served("plan", "show", "--explain", made[0]).out
    assert "What was expected\n  1 endpoint from" in told
    assert "- m in all regions: " in told, "there is no node, and so no place"
    drawn = served("plan", "plot", made[0], tmp_path / "plan.png", "--json").json
    assert (drawn["drawn"], drawn["endpoints"]) == (1, 1)
    assert (tmp_path / "plan.png").stat().st_size > 10_000
    assert "no endpoint" in served("plan", "plot", made[0], tmp_path / "plan.png", "--model", "x").err
    assert "must end in" in served("plan", "plot", made[0], tmp_path / "plan.doc").err
    made.append(served("plan", "create", "--json").json["plan"]["id"])
    assert served("plan", "reject", made[1], "--note", "no", "--json").json["plan"]["state"] == "rejected"
    made.append(served("plan", "create", "--json").json["plan"]["id"])
    assert served("plan", "apply", made[2]).status == 0
    back = served("plan", "rollback", made[2], "--note", "too few").out
    assert f"takes back plan {made[2]}" in back
    restored = back.split()[1]
    assert "Approved by admin" in served("plan", "show", "--explain", restored).out
    problem = json.loads(served("plan", "inputs", "--problem", made[2]).out)
    assert problem["regions"] == ["us-east"]


def test_pins(served: Run, tmp_path: Path) -> None:
    served("region", "add", "us-east")
    served("gpu", "add", "H800", "--memory-gib", 80, "--cost-per-hour", 2.5)
    folder = write_checkpoint(tmp_path / "tiny")
    served("model", "add", "org/m", "--path", folder, "--tokens-per-s", "H800=1200", "--region", "us-east")
    until = time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime(time.time() + 86_400))
    add = ("pin", "add", "org/m", "us-east", "--instances", 4)
    assert "launch" not in served(*add, "--until", until, "--note", "launch week").out
    row = served("pin", "list", "--json").json["data"][0]
    assert (row["instances"], row["note"], row["until"][:16]) == (4, "launch week", until[:16])
    assert "launch week" in served("pin", "list").out
    assert "(409)" in served(*add, "--until", until).err
    assert served(*add, "--until", "friday").status == 2
    assert "not in the future" in served(*add, "--until", "2020-01-01").err
    assert "is pinned no more" in served("pin", "remove", row["id"][:-1]).out
    assert served("pin", "list").out == "Pins: none\n"
    assert row["id"] in served("pin", "list", "--all").out


def test_spot(served: Run, tmp_path: Path, database: Database) -> None:
    served("region", "add", "us-east")
    served("gpu", "add", "H800", "--memory-gib", 80, "--cost-per-hour", 2.5)
    folder = write_checkpoint(tmp_path / "tiny")
    served("model", "add", "org/m", "--path", folder, "--tokens-per-s", "H800=1200", "--region", "us-east")
    slot = SlotSpec(gpus=1, memory_bytes=2**30)
    join = Join(node="n-1", region="us-east", gpu_type="H800", url="http://x", slots=(slot,), engine="replay")
    assert served("spot", "list").out == "Spot instances: none\n"
    with database.transaction() as session:
        join_node(session, join)
        made = add_instance(session, model="org/m", region="us-east", gpu_type="H800", node="n-1", slot=0, gpus=1)
        session.flush()
        set_desired(session, [made.id], Desired.SPOT)
        session.get_one(Instance, made.id).observed = InstanceState.SPOT
        held = made.id
    lease = ("spot", "lease", held, "--holder", "lab")
    assert f"{held} is leased to lab until" in served(*lease).out
    row = served("spot", "list", "--json").json["data"][0]
    assert (row["instance_id"], row["lease"]["holder"], row["ready"]) == (held, "lab", True)
    assert "lab" in served("spot", "list").out
    assert "(409)" in served(*lease).err
    assert "must be from 60 to 86400" in served(*lease, "--duration-s", 5).err
    assert served("spot", "lease", held).status == 2
    assert served("spot", "return", held, "--json").json["end_reason"] == "returned"
    assert "nobody leases" in served("spot", "return", held).err
    assert served(*lease, "--duration-s", 60, "--json").json["holder"] == "lab"
    assert served("spot", "return", held).out == f"{held} is returned\n"


def test_requests(served: Run, database: Database) -> None:
    with database.transaction() as session:
        write_requests(session, [logged("req_a"), logged("req_b", outcome="no_capacity", status=503, nodes=[])])
    shown = served("request", "show", "req_a")
    assert (shown.status, shown.err) == (0, "")
    for words in ("ok (200)", "n1, n2", "acme", "0.250 s", "/v1/completions"):
        assert words in shown.out
    assert served("request", "show", "req_b", "--json").json["data"][0]["outcome"] == "no_capacity"
    listed = served("request", "list", "--since", "1h")
    assert listed.out.index("req_b") < listed.out.index("req_a")
    failed = served("request", "list", "--outcome", "failed", "--tenant", "acme", "--json").json
    assert [row["request_id"] for row in failed["data"]] == ["req_b"]
    assert "only the newest 1" in served("request", "list", "--limit", 1).out
    assert served("request", "list", "--model", "none").out == "Requests: none\n"
    unknown = served("request", "show", "req_c")
    assert unknown.status == 1
    assert "no request 'req_c' is in the log, which goes back 24 hours" in unknown.err
    assert served("request", "list", "--since", "soon").status == 2


def logged(request_id: str, **changes: Any) -> RequestRecord:
    values: dict[str, Any] = {
        "ended_at": datetime.now(UTC),
        "endpoint": "/v1/completions",
        "tenant": "acme",
        "model": "tide",
        "outcome": "ok",
        "nodes": ["n1", "n2"],
        "first_token_s": 0.25,
    }
    return RequestRecord(request_id=request_id, **(values | changes))
