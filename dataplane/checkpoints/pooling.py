"""What a checkpoint answers with, and how an embedding or a score follows from the states of its tokens.

Embedding models are folders of sentence-transformers: `modules.json` lists what follows the transformer (a pooling, a
normalization), `1_Pooling/config.json` says which tokens are pooled, `config_sentence_transformers.json` has prompts.
Cross-encoders are checkpoints with a classification head. Only JSON is read here.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dataplane.checkpoints.safetensors_file import read_json, read_json_list
from dataplane.protocol.errors import ModelLoadError
from dataplane.protocol.messages import Task

MODULES = "modules.json"
PROMPTS = "config_sentence_transformers.json"
LENGTHS = "sentence_bert_config.json"
_FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
HEAD_SUFFIX = "ForSequenceClassification"
HEADS = ("lm_head.", "score.")
"""How the names of tensors begin that an embedding does not need."""

PooledTokens = Literal["last", "mean", "cls"]
"""Which states make an embedding: the last token's, the mean of all, or the first token's."""
_POOLED: dict[str, PooledTokens] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_MODES: dict[str, str] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Flags of a pooling's config, and the modes that they stand for."""


@dataclass(frozen=True, kw_only=True)
class EmbeddingRules:
    """How a checkpoint embeds a text. `size`: numbers of an embedding; `shorter`: to which it may be cut (Matryoshka),
    None: to any. `prompts` by name; `default_prompt` precedes every text for which none is named. `tokens_max`: of one
    text, None: the context.
    """

    size: int
    pooled: PooledTokens = "last"
    normalize: bool = True
    shorter: tuple[int, ...] | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    tokens_max: int | None = None


@dataclass(frozen=True, kw_only=True)
class ScoreRules:
    """How a checkpoint scores a pair of texts. `tokens`: the two tokens, for no and yes, whose logits a causal model is
    scored by; None: it has a head of one output, which passes through a `sigmoid`.
    """

    tokens: tuple[str, str] | None = None
    sigmoid: bool = True


def task_of(folder: Path, config: Mapping[str, Any]) -> Task:
    """The task of a checkpoint folder with the config `config`.

    Raises:
        ModelLoadError: `modules.json` cannot be read.
    """
    names = config.get("architectures")
    architecture = str(names[0]) if isinstance(names, list) and names else ""
    if architecture.endswith(HEAD_SUFFIX):
        return "score"
    pools = any(_kind(module) == "Pooling" for module in _modules(folder))
    return "embed" if pools or architecture.endswith("Model") else "generate"


def read_embedding_rules(folder: Path) -> EmbeddingRules:
    """The rules of an embedding checkpoint. One without sentence-transformers files pools the last token, normalized.

    Raises:
        ModelLoadError: a file cannot be read, or asks for something that is not supported.
    """
    config = read_json(folder / "config.json")
    size = config.get("hidden_size")
    if not isinstance(size, int) or size < 1:
        raise ModelLoadError(f"{folder}/config.json: hidden_size must be a whole number above 0, is {size!r}")
    _check_causal(folder, config)
    modules = _modules(folder)
    prompts, default_prompt = _prompts(folder)
    return EmbeddingRules(
        size=size,
        pooled=_pooled(folder, modules),
        normalize=not modules or any(_kind(module) == "Normalize" for module in modules),
        shorter=_shorter(folder, config),
        prompts=prompts,
        default_prompt=default_prompt,
        tokens_max=_tokens_max(folder),
    )


def read_score_rules(folder: Path) -> ScoreRules:
    """The rules of a scoring checkpoint.

    Raises:
        ModelLoadError: a file cannot be read, or the head has not one output.
    """
    config = read_json(folder / "config.json")
    _check_causal(folder, config)
    names = config.get("architectures")
    if isinstance(names, list) and names and not str(names[0]).endswith(HEAD_SUFFIX):
        given = config.get("classifier_from_token", ["no", "yes"])
        if not isinstance(given, list) or len(given) != 2 or not all(isinstance(token, str) for token in given):
            raise ModelLoadError(f"{folder}/config.json: classifier_from_token must be two tokens, is {given!r}")
        return ScoreRules(tokens=(given[0], given[1]))
    labels = config.get("id2label")
    outputs = len(labels) if isinstance(labels, dict) else config.get("num_labels", 2)
    if outputs != 1:
        raise ModelLoadError(f"{folder}: its head has {outputs} outputs; a model that scores has one")
    own = config.get("sentence_transformers")
    activation = own.get("activation_fn") if isinstance(own, dict) else None
    activation = activation or config.get("sbert_ce_default_activation_function") or "Sigmoid"
    kind = str(activation).rpartition(".")[2]
    if kind not in ("Sigmoid", "Identity"):
        raise ModelLoadError(f"{folder}: activation {kind} of its head is not supported; Sigmoid and Identity are")
    return ScoreRules(sigmoid=kind == "Sigmoid")


def _check_causal(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse attention to later tokens: prompts are computed in chunks."""
    if config.get("is_causal") is False or config.get("use_bidirectional_attention"):
        raise ModelLoadError(f"{folder}: its attention is bidirectional, which is not supported")


def _modules(folder: Path) -> list[Mapping[str, Any]]:
    file = folder / MODULES
    if not file.exists():
        return []
    modules = read_json_list(file)
    if not all(isinstance(module, dict) for module in modules):
        raise ModelLoadError(f"{file} must be a list of objects")
    return modules


def module_folders(folder: Path) -> list[str]:
    """The sub-folders that the modules of a checkpoint are in.

    Raises:
        ModelLoadError: `modules.json` cannot be read, or names a path outside of the folder.
    """
    paths = [str(module.get("path") or "") for module in _modules(folder)]
    strange = [path for path in paths if path and not _FOLDER.fullmatch(path)]
    if strange:
        raise ModelLoadError(f"{folder / MODULES}: {strange[0]!r} is no name of a folder")
    return [path for path in paths if path]


def _kind(module: Mapping[str, Any]) -> str:
    """The class of a module, without its Python path, which differs between versions of the library."""
    return str(module.get("type", "")).rpartition(".")[2]


def _pooled(folder: Path, modules: list[Mapping[str, Any]]) -> PooledTokens:
    known = ("Transformer", "Pooling", "Normalize")
    unknown = next((_kind(module) for module in modules if _kind(module) not in known), None)
    if unknown is not None:
        raise ModelLoadError(f"{folder / MODULES}: module {unknown} is not supported; {', '.join(known)} are")
    poolings = [str(module.get("path") or "") for module in modules if _kind(module) == "Pooling"]
    if not modules:
        return "last"
    if len(poolings) != 1 or module_folders(folder).count(poolings[0]) > 1:
        raise ModelLoadError(f"{folder / MODULES}: there must be one module Pooling, with a folder of its own")
    file = folder / poolings[0] / "config.json"
    described = read_json(file)
    mode = described.get("pooling_mode")
    modes = [str(mode)] if mode else [name for flag, name in _MODES.items() if described.get(flag)]
    pooled = _POOLED.get(modes[0]) if len(modes) == 1 else None
    if pooled is None:
        asked = ", ".join(modes) or "none"
        raise ModelLoadError(f"{file}: pooling {asked} is not supported; one of {', '.join(_POOLED)} is")
    if described.get("include_prompt") is False:
        raise ModelLoadError(f"{file}: include_prompt false is not supported")
    return pooled


def _prompts(folder: Path) -> tuple[dict[str, str], str]:
    file = folder / PROMPTS
    described = read_json(file) if file.exists() else {}
    prompts, default = described.get("prompts") or {}, described.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ModelLoadError(f"{file}: prompts must be texts by name")
    if default is not None and default not in prompts:
        raise ModelLoadError(f"{file}: default_prompt_name {default!r} is none of the prompts")
    return prompts, "" if default is None else str(prompts[default])


def _shorter(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...] | None:
    sizes = config.get("matryoshka_dimensions")
    if sizes is None:
        return None
    if not isinstance(sizes, list) or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ModelLoadError(f"{folder}/config.json: matryoshka_dimensions must be whole numbers, is {sizes!r}")
    return tuple(sorted(sizes))


def _tokens_max(folder: Path) -> int | None:
    file = folder / LENGTHS
    described = read_json(file) if file.exists() else {}
    if described.get("do_lower_case"):
        raise ModelLoadError(f"{file}: do_lower_case is not supported")
    most = described.get("max_seq_length")
    if most is not None and (not isinstance(most, int) or most < 1):
        raise ModelLoadError(f"{file}: max_seq_length must be a whole number above 0, is {most!r}")
    return most
