"""The tables of what the sections of the GPU benchmark found."""

from collections.abc import Callable, Mapping
from typing import Any

from ops.client.screen import Columns, print_table

Found = Mapping[str, Any]

_STREAMS: Columns = {
    "server": "arm",
    "streams": "streams",
    "tokens/s": lambda row: f"{row['tokens_per_s']:,.0f}",
    "first token, ms": lambda row: _ms(row["ttft_s"]),
    "longest": lambda row: _ms(row["ttft_longest_s"]),
    "gap, ms": lambda row: _ms(row["gap_s"]),
    "P99": lambda row: _ms(row["gap_p99_s"]),
    "longest gap": lambda row: _ms(row["gap_longest_s"]),
}
_RATES: Columns = {
    "sequences": "sequences",
    "tokens/s": lambda row: f"{row['graphs']:,.0f}",
    "without graphs": lambda row: f"{row['no_graphs']:,.0f}",
    "memory's floor": lambda row: f"{row['floor']:,.0f}",
    "share of it": lambda row: f"{row['share']:.0%}",
}


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}"


def _checkpoints(found: Found, title: str) -> None:
    columns: Columns = {"model": "name", "GB": lambda row: f"{row['weights_bytes'] / 1e9:.2f}"}
    print_table(title, columns, found["models"])


def _switches(found: Found, title: str) -> None:
    columns: Columns = {
        "device": "device",
        "threads": "threads",
        "figure": "name",
        "value": lambda row: f"{row['value']:.3f}",
        "goal": lambda row: f"{row['bound']} {row['target']:g}",
        "GB": lambda row: f"{row['details']['bytes'] / 1e9:.2f}",
        "ms": lambda row: _ms(row["details"]["switch_s"]),
    }
    print_table(title, columns, found["switches"])


def _starts(found: Found, title: str) -> None:
    columns: Columns = {
        "prompt": "prompt_tokens",
        "load, then run, s": lambda row: f"{row['whole_s']:.3f}",
        "layer by layer, s": lambda row: f"{row['layerwise_s']:.3f}",
        "run, s": lambda row: f"{row['run_s']:.3f}",
        "hidden of what can be": lambda row: "-" if row["hidden"] is None else f"{row['hidden']:.0%}",
    }
    print_table(title, columns, found["starts"])


def _decodes(found: Found, title: str) -> None:
    print_table(f"{title}, copies at {found['copy_bytes_per_s'] / 1e12:.3g} TB/s", _RATES, found["decodes"])


def _node(found: Found, title: str) -> None:
    print_table(title, _STREAMS, found["streams"])
    gap_s = found["heartbeat_gap_longest_s"]
    facts: Columns = {
        "devices": "devices",
        "greedy answers that came again": "greedy_answers_repeated",
        "switches": "switches",
        "heartbeats": "heartbeats",
        "longest between two, s": lambda _: "-" if gap_s is None else f"{gap_s:.2f}",
    }
    print_table("Of that node", facts, [found])


def _vllm(found: Found, title: str) -> None:
    print_table(f"{title}: {found['version']}, temperature 1.0", _STREAMS, found["streams"])


def _tests(found: Found, title: str) -> None:
    columns: Columns = {
        "environment": "environment",
        "passed": "passed",
        "failed": lambda row: row["failed"] + row["error"],
        "skipped": "skipped",
        "why": lambda row: "; ".join([*row["failures"], *row["why_skipped"]]),
    }
    print_table(title, columns, found["tests"])


def _handovers(found: Found, title: str) -> None:
    columns: Columns = {
        "KV is waited for": "kv_events",
        "prompt": "prompt_tokens",
        "second token after, s": lambda row: f"{row['gap_s']:.4f}",
        "longest, s": lambda row: f"{row['longest_s']:.4f}",
        "copies waited for": lambda row: ", ".join(f"{name} {count}" for name, count in row["waited_for"].items()),
    }
    print_table(title, columns, found["handovers"])


def _quantized(found: Found, title: str) -> None:
    print_table(f"{title}: decode", {"format": "format", **_RATES}, found["decodes"])
    columns: Columns = {"format": "format", "rows": "rows", "packed": lambda row: f"{row['packed']:.2f}x"}
    print_table(f"{title}: a layer's product over that in bfloat16", columns, found["products"])


TABLES: Mapping[str, Callable[[Found, str], None]] = {
    "checkpoints": _checkpoints,
    "switches": _switches,
    "starts": _starts,
    "decodes": _decodes,
    "node": _node,
    "vllm": _vllm,
    "tests": _tests,
    "handovers": _handovers,
    "quantized": _quantized,
}
