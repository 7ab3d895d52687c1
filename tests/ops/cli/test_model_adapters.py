"""`tidepool model add --base --adapter`, adapters in a fleet's file, and `node plan-memory --adapter`."""

from pathlib import Path
from typing import Any

from ops.profiling.checkpoints import Shape, build_checkpoints
from tests.dataplane.checkpoints.test_adapters import write
from tests.ops.cli.running import Run


def add(fleet: Run, folder: Path, *more: Any) -> Any:
    return fleet("model", "add", "help", "--base", "m", "--adapter", folder, *more)


def test_an_adapter_takes_over_what_its_base_has(fleet: Run, tmp_path: Path) -> None:
    folder = write(tmp_path / "help")
    made = add(fleet, folder, "--region", "us-east", "--json").json
    base = fleet("model", "show", "m", "--json").json["model"]
    assert (made["model"]["base"], made["model"]["path"]) == ("m", str(folder))
    assert (made["model"]["weights_bytes"], made["model"]["parameters"]) == (192, 96)
    assert all(made["model"][name] == base[name] for name in ("kv_bytes_per_token", "context_tokens", "architecture"))
    assert [profile["tokens_per_s"] for profile in made["profiles"]] == [1200]
    assert [endpoint["region"] for endpoint in made["endpoints"]] == ["us-east"]
    assert "LoRA adapter of" in fleet("model", "show", "help").out
    assert fleet("model", "show", "m", "--json").json["adapters"] == ["help"]
    assert "LoRA adapters" in fleet("model", "show", "m").out
    assert "LoRA adapters" not in fleet("model", "show", "help").out
    timed = fleet("model", "profile", "help", "--tokens-per-s", "H800=900", "--latency", "auto", "--json").json[0]
    whole = fleet("model", "profile", "m", "--tokens-per-s", "H800=900", "--latency", "auto", "--json").json[0]
    assert timed["latency"] == whole["latency"], "its steps are its base's"


def test_bad_options_are_refused(fleet: Run, tmp_path: Path) -> None:
    folder = write(tmp_path / "help", use_dora=True)
    for arguments, message in (
        (("--base", "m"), "--base and --adapter go together"),
        (("--path", folder, "--base", "m", "--adapter", folder), "give either --path, or --base and --adapter"),
        ((), "give either --path, or --base and --adapter"),
    ):
        refused = fleet("model", "add", "x", *arguments)
        assert (refused.status, message in " ".join(refused.err.split())) == (2, True), refused.err
    assert "use_dora is not supported" in add(fleet, folder).err
    unknown = fleet("model", "add", "x", "--base", "none", "--adapter", write(folder))
    assert (unknown.status, "'none' is not registered" in unknown.err) == (1, True)


def test_a_file_makes_bases_before_their_adapters_and_deletes_them_after(fleet: Run, tmp_path: Path) -> None:
    assert fleet("model", "add", "a-first", "--base", "m", "--adapter", write(tmp_path / "help")).status == 0
    text = fleet("export").out
    for name in ("a-first", "m"):
        if name == "m":
            assert fleet("endpoint", "delete", "m", "us-east", "--yes").status == 0
            refused = fleet("model", "delete", "m", "--yes")
            assert refused.status == 0, refused.err
        else:
            assert "is in use" in fleet("model", "delete", "m", "--yes").err
            assert fleet("model", "delete", name, "--yes").status == 0
    exported = tmp_path / "exported.yaml"
    exported.write_text(text)
    outcome = fleet("apply", "-f", exported, "--json")
    assert outcome.status == 0, outcome.out
    assert [change["key"] for change in outcome.json["changes"] if change["kind"] == "model"] == [["m"], ["a-first"]]
    assert fleet("export").out == text
    lacking = text.replace("base: m", "base: other")
    exported.write_text(lacking)
    assert "model 'other' is neither in the file nor registered" in fleet("apply", "-f", exported).err
    (tmp_path / "empty.yaml").write_text("owner: apply\n")
    pruned = fleet("apply", "-f", tmp_path / "empty.yaml", "--prune", "--yes", "--json")
    gone = [change["key"] for change in pruned.json["changes"] if change["kind"] == "model"]
    assert gone == [["a-first"], ["m"]], pruned.out


def test_memory_is_planned_with_adapters(run: Run, tmp_path: Path) -> None:
    [model] = build_checkpoints(tmp_path, [Shape(hidden=64, layers=2, head_dim=16)], "float32")
    folder = write(tmp_path / "help")
    without = run("node", "plan-memory", model.folder, "--card", "L4", "--json").json
    arguments = ("node", "plan-memory", model.folder, "--adapter", folder, "--adapter", folder, "--card", "L4")
    plan = run(*arguments, "--json").json
    assert plan["adapters_bytes"] == 2 * 192
    assert plan["usable_bytes"] == without["usable_bytes"] - 2 * 192
    of_one, of_two = (" ".join(run(*arguments, "--gpus", gpus).out.split()) for gpus in (1, 2))
    assert "TIDEPOOL_AGENT_ADAPTERS_BYTES 384 at least, in bfloat16" in of_one
    assert "TIDEPOOL_AGENT_ADAPTERS_BYTES 384 at most, as each GPU has a part of them, in bfloat16" in of_two
    broken = run("node", "plan-memory", model.folder, "--adapter", tmp_path, "--card", "L4")
    assert broken.status == 1
    assert "adapter_config.json does not exist" in broken.err


def test_an_adapter_is_served_with_its_base(fleet: Run, tmp_path: Path) -> None:
    folder = write(tmp_path / "help")
    said = add(fleet, folder, "--with-base")
    assert (said.status, "every instance of m serves it" in said.out) == (0, True), said.err
    shown = fleet("model", "show", "help", "--json").json
    assert (shown["model"]["with_base"], shown["endpoints"], shown["profiles"]) == (True, [], [])
    assert shown["adapter_instances"] == []
    text = fleet("model", "show", "help").out
    assert "m, whose instances serve it" in text
    assert "Profiles" not in text
    for more, message in (
        (("--region", "us-east"), "--region says where a model is placed; with --with-base that is where m is"),
        (("--like", "m"), "--like says where a model is placed"),
        (("--tokens-per-s", "H800=900"), "--tokens-per-s says where a model is placed"),
    ):
        assert message in " ".join(add(fleet, folder, "--with-base", *more).err.split())
    alone = fleet("model", "add", "x", "--path", folder, "--with-base")
    assert "--with-base is for an adapter" in " ".join(alone.err.split())
    refused = fleet("endpoint", "set", "help", "us-east", "--max", "2")
    assert "'help' is served by the instances of 'm', wherever that is offered" in refused.err, refused.err
    exported = tmp_path / "exported.yaml"
    exported.write_text(fleet("export").out)
    assert "with_base: true" in exported.read_text()
    assert fleet("model", "delete", "help", "--yes").status == 0
    assert fleet("apply", "-f", exported, "--json").status == 0
    assert fleet("model", "show", "help", "--json").json["model"]["with_base"]
