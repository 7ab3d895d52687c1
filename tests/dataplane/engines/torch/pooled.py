"""Tiny random checkpoints that embed or score, and their answers by transformers itself."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from dataplane.protocol.messages import ModelSpec, Task
from tests.dataplane.engines.torch.tiny import save_tiny, spec_of, tiny_config

_MODES = {"last": "lasttoken", "mean": "mean", "cls": "cls"}
_FLAGS = {"last": "pooling_mode_lasttoken", "mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token"}
_PACKAGE = "sentence_transformers.models"


def save_embedding(architecture: str, folder: Path, *, pooled: str = "last", normalize: bool = True) -> Path:
    """A headless checkpoint with the files of sentence-transformers."""
    causal = save_tiny(architecture, folder.with_name(f"{folder.name}-causal"))
    load: Any = AutoModel.from_pretrained
    load(causal, dtype=torch.float32).save_pretrained(folder)
    write_modules(folder, pooled=pooled, normalize=normalize)
    return folder


def write_modules(folder: Path, *, pooled: str = "last", normalize: bool = True, flags: bool = True) -> None:
    """The files of sentence-transformers; `flags`: as versions before 6 wrote the pooling."""
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")] + [("2_Normalize", "Normalize")] * normalize
    described = [
        {"idx": index, "name": str(index), "path": path, "type": f"{_PACKAGE}.{kind}"}
        for index, (path, kind) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(described))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    old = {flag: kind == pooled for kind, flag in _FLAGS.items()}
    pooling = {"include_prompt": True, **(old if flags else {"pooling_mode": _MODES[pooled]})}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def save_scoring(architecture: str, folder: Path, **changes: Any) -> Path:
    """A checkpoint with a classification head of one output."""
    torch.manual_seed(3)
    build: Any = AutoModelForSequenceClassification.from_config
    model = build(tiny_config(architecture, num_labels=1, **changes), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(folder)
    return folder


def pooled_spec(name: str, folder: Path, task: Task, **changes: Any) -> ModelSpec:
    return replace(spec_of(name, folder, **changes), task=task)


def reference_embedding(folder: Path, prompt: Sequence[int], *, pooled: str = "last", normalize: bool = True) -> Any:
    """The embedding `[size]` by transformers' own forward pass over the whole prompt."""
    load: Any = AutoModel.from_pretrained
    model = load(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        states = model(input_ids=torch.tensor([list(prompt)])).last_hidden_state[0]
        vector = {"last": states[-1], "cls": states[0], "mean": states.mean(dim=0)}[pooled]
        return torch.nn.functional.normalize(vector, dim=-1) if normalize else vector


def reference_score(folder: Path, prompt: Sequence[int]) -> float:
    """The score by transformers' own classification model."""
    load: Any = AutoModelForSequenceClassification.from_pretrained
    model = load(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        return float(model(input_ids=torch.tensor([list(prompt)])).logits[0, 0].sigmoid())


def reference_choice(folder: Path, prompt: Sequence[int], no: int, yes: int) -> float:
    """The probability of `yes` against `no` after the prompt, by transformers' own causal model."""
    load: Any = AutoModelForCausalLM.from_pretrained
    model = load(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([list(prompt)])).logits[0, -1]
        return float(torch.softmax(logits[[no, yes]], dim=-1)[1])
