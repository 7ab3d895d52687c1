"""Stacks whose nodes run checkpoints with the torch engine, and a checkpoint whose chat template knows tools."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import load_file, save_file

from ops.local.checkpoints import describe_checkpoint
from ops.local.ports import free_port
from ops.local.sample_fleet import REGIONS, TOKENS_PER_S, live_instances, offer_model
from ops.local.stack import LocalNode, LocalStack
from ops.local.tiny_models import build_tiny_models
from tests.flows.conftest import admin_of
from tests.flows.waiting import wait_until

TEMPLATE = """{%- if tools %}Tools, to be called as <tool_call>{"name": ..., "arguments": ...}</tool_call>:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}
{%- for message in messages %}<|{{ message.role }}|>{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
</tool_call>
{%- endfor %}
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""


def tool_model(folder: Path, name: str) -> Path:
    """The checkpoint folder of a tiny model whose template has tools in Hermes' form."""
    [tiny] = build_tiny_models(folder, [name])
    path = tiny.path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    return tiny.path


def embedding_model(folder: Path) -> Path:
    """The checkpoint folder of a tiny model without a head, pooled as sentence-transformers describes it."""
    [tiny] = build_tiny_models(folder / "embedding", ["tiny-qwen3"])
    weights = tiny.path / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(weights).items() if name != "lm_head.weight"}
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, weights)
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    described = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(modules)
    ]
    (tiny.path / "modules.json").write_text(json.dumps(described))
    (tiny.path / "1_Pooling").mkdir()
    (tiny.path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    return tiny.path


@contextmanager
def checkpoint_stack(home: Path, folders: Mapping[str, Path], *, regions: int = 1) -> Iterator[LocalStack]:
    """A running stack: in each region a node, with an instance of every model."""
    nodes = tuple(
        LocalNode(
            name=f"{region.name}-1", region=region.name, gpu_type=region.gpu_type, gpus=4, memory_bytes=96 * 2**20
        )
        for region in REGIONS[:regions]
    )
    with LocalStack(home, free_port(), nodes, environment={"TIDEPOOL_SCALE_EVERY_S": "1"}, report=[].append) as stack:
        with admin_of(stack) as admin:
            for position, region in enumerate(REGIONS[:regions]):
                admin.put(f"/admin/regions/{region.name}", {"position": position})
            for gpu_type in TOKENS_PER_S:
                admin.put(f"/admin/gpu-types/{gpu_type}", {"memory_bytes": 80 * 2**30, "cost_per_hour": 2.0})
            for model, folder in folders.items():
                admin.put(f"/admin/models/{model}", describe_checkpoint(folder))
                offer_model(admin, model, TOKENS_PER_S, [region.name for region in REGIONS[:regions]], 1, 1)
            wait_until(
                lambda: sum(row["state"] == "ready" for row in live_instances(admin)) == regions * len(folders),
                "every instance is ready",
                180.0,
            )
        yield stack
