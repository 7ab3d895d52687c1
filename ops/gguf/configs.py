"""The `config.json` of a GGUF file. Unknown settings are refused, since ignoring one could change the tokens."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ops.gguf.header import GgufError, GgufHeader

_COUNT_MAX = 2**24
_LAYERS_MAX = 1024
_ROPE_BASE = 10_000.0
"""Default of llama.cpp; also Gemma 3's base in layers with a sliding window."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How GGUF stores an architecture. `keys`: names of its settings in GGUF and in `config.json`, except those of
    `_sizes`. `fixed`: constants of `config.json`. `more`: computes other settings. `permuted`: rows of queries and keys
    are interleaved. `norms_plus_one`: norms are stored with 1 added.
    """

    model_type: str
    keys: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    more: Callable[["Fields"], dict[str, Any]] = lambda _fields: {}
    permuted: bool = False
    norms_plus_one: bool = False


class Fields:
    """The settings of a file's architecture. Those that no caller has read at the end are unsupported."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        self.architecture = str(header.metadata.get("general.architecture"))
        self._prefix = f"{self.architecture}."
        self._unread = {key for key in header.metadata if key.startswith(self._prefix)}

    def get(self, key: str, default: Any = None) -> Any:
        self._unread.discard(self._prefix + key)
        return self.header.metadata.get(self._prefix + key, default)

    def need(self, key: str) -> Any:
        """A setting. Raises GgufError if it is missing."""
        value = self.get(key)
        if value is None:
            raise self.error(f"{self._prefix}{key} is missing")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A size. Raises GgufError if it is missing, or no integer from 1 to 16 million."""
        value = self.need(key) if default is None else self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < _COUNT_MAX:
            raise self.error(f"{self._prefix}{key} must be a number from 1 to {_COUNT_MAX - 1}, is {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number, rounded to the precision of 32-bit floats. Raises GgufError if it is missing or no number."""
        value = self.need(key) if default is None else self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(f"{self._prefix}{key} must be a number, is {value!r}")
        return float(f"{value:.7g}")

    def expect(self, key: str, *allowed: Any) -> None:
        """Raises GgufError unless the setting is missing or has one of these values."""
        value = self.get(key, allowed[0])
        if value not in allowed:
            raise self.error(f"{self._prefix}{key} = {value!r} is not supported")

    def finish(self) -> None:
        """Raises GgufError with the settings that were not read."""
        if self._unread:
            raise self.error(f"{', '.join(sorted(self._unread))} is not supported")

    def error(self, message: str) -> GgufError:
        return GgufError(f"{self.header.path}: {message}")


def _gemma_scale(fields: Fields, layers_of_27b: int) -> int:
    """The scale of queries: the size of a head, except for the 27B models."""
    if fields.count("block_count") == layers_of_27b:
        return fields.count("embedding_length") // fields.count("attention.head_count")
    return fields.count("attention.key_length")


def _gemma2(fields: Fields) -> dict[str, Any]:
    return {
        "layer_types": _windows(fields, every=2),
        "query_pre_attn_scalar": _gemma_scale(fields, layers_of_27b=46),
        "attn_logit_softcapping": fields.number("attn_logit_softcapping"),
        "final_logit_softcapping": fields.number("final_logit_softcapping"),
    }


def _gemma3(fields: Fields) -> dict[str, Any]:
    cap = fields.get("final_logit_softcapping")
    return {
        "layer_types": _windows(fields, every=6),
        "query_pre_attn_scalar": _gemma_scale(fields, layers_of_27b=62),
        "final_logit_softcapping": cap and fields.number("final_logit_softcapping"),
        "rope_local_base_freq": fields.number("rope.freq_base_swa", _ROPE_BASE),
    }


def _windows(fields: Fields, *, every: int) -> list[str]:
    """The attention of each layer, by the file's list or period; by default each `every`-th layer is full."""
    layers = fields.count("block_count")
    pattern = fields.get("attention.sliding_window_pattern", every)
    if isinstance(pattern, int) and pattern > 0:
        pattern = [(layer + 1) % pattern != 0 for layer in range(layers)]
    if not isinstance(pattern, list) or len(pattern) != layers:
        raise fields.error(f"attention.sliding_window_pattern must be a period or name {layers} layers")
    return ["sliding_attention" if slides else "full_attention" for slides in pattern]


def _smollm3(fields: Fields) -> dict[str, Any]:
    return {"no_rope_layers": [int((layer + 1) % 4 != 0) for layer in range(fields.count("block_count"))]}


def _phi3(fields: Fields) -> dict[str, Any]:
    window = fields.get("attention.sliding_window")
    return {"sliding_window": window and fields.count("attention.sliding_window")}


def _biased_llama(fields: Fields) -> dict[str, Any]:
    tensors = fields.header.tensors
    return {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_up.bias" in tensors}


_RMS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_SILU = {"hidden_act": "silu"}
_GELU = {"hidden_activation": "gelu_pytorch_tanh"}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_NO_BIAS = {"attention_bias": False}
_NO_WINDOW = {"use_sliding_window": False}
ARCHITECTURES: dict[str, Architecture] = {
    "cohere2": Architecture(
        model_type="cohere2",
        keys={"attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale", **_WINDOW},
        fixed=_SILU | _NO_BIAS,
        more=lambda fields: {"layer_types": _windows(fields, every=4)},
    ),
    "gemma2": Architecture(
        model_type="gemma2", keys=_RMS | _WINDOW, fixed=_GELU | _NO_BIAS, more=_gemma2, norms_plus_one=True
    ),
    "gemma3": Architecture(
        model_type="gemma3_text", keys=_RMS | _WINDOW, fixed=_GELU | _NO_BIAS, more=_gemma3, norms_plus_one=True
    ),
    "granite": Architecture(
        model_type="granite",
        keys={
            **_RMS,
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        fixed=_SILU,
        more=_biased_llama,
        permuted=True,
    ),
    "llama": Architecture(model_type="llama", keys=_RMS, fixed=_SILU, more=_biased_llama, permuted=True),
    "olmo2": Architecture(model_type="olmo2", keys=_RMS, fixed=_SILU | _NO_BIAS),
    "phi3": Architecture(model_type="phi3", keys=_RMS, fixed=_SILU, more=_phi3),
    "qwen2": Architecture(model_type="qwen2", keys=_RMS, fixed=_SILU | _NO_WINDOW),
    "qwen3": Architecture(model_type="qwen3", keys=_RMS, fixed=_SILU | _NO_BIAS | _NO_WINDOW),
    "qwen3moe": Architecture(
        model_type="qwen3_moe",
        keys={
            **_RMS,
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        fixed=_SILU | _NO_BIAS | _NO_WINDOW | {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "smollm3": Architecture(
        model_type="smollm3",
        keys=_RMS,
        fixed=_SILU | _NO_BIAS | _NO_WINDOW | {"mlp_bias": False},
        more=_smollm3,
        permuted=True,
    ),
    "starcoder2": Architecture(
        model_type="starcoder2",
        keys={"attention.layer_norm_epsilon": "norm_epsilon"},
        fixed={"hidden_act": "gelu_pytorch_tanh", "use_bias": True, "sliding_window": None},
    ),
}
"""By the name in `general.architecture`. Files of Mistral models have llama, which computes the same."""


def read_config(header: GgufHeader) -> dict[str, Any]:
    """The `config.json` of a file, without `dtype`.

    Raises:
        GgufError: the architecture or one of its settings is not supported.
    """
    fields = Fields(header)
    if fields.architecture not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise fields.error(f"the architecture {fields.architecture!r} is not supported; supported are {supported}")
    architecture = ARCHITECTURES[fields.architecture]
    config: dict[str, Any] = {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[architecture.model_type]]}
    config |= {"model_type": architecture.model_type, **_sizes(fields), **architecture.fixed, **_rope(fields)}
    for key, name in architecture.keys.items():
        whole = isinstance(fields.get(key), int)
        config[name] = fields.count(key) if whole else fields.number(key)
    config |= architecture.more(fields)
    fields.finish()
    return config


def _sizes(fields: Fields) -> dict[str, Any]:
    """Settings of all architectures."""
    metadata = fields.header.metadata
    embedding = fields.header.tensors.get("token_embd.weight")
    hidden, heads = fields.count("embedding_length"), fields.count("attention.head_count")
    if embedding is None or embedding.shape[1:] != (hidden,):
        raise fields.error(f"token_embd.weight must have rows of {hidden} values")
    vocabulary = embedding.shape[0]
    fields.expect("vocab_size", vocabulary)
    head_dim = fields.count("attention.key_length", hidden // heads)
    fields.expect("attention.value_length", head_dim)
    fields.expect("rope.dimension_count", head_dim)
    layers = fields.count("block_count")
    if layers > min(_LAYERS_MAX, len(fields.header.tensors)):
        raise fields.error(f"{layers} layers are more than its {len(fields.header.tensors)} tensors, or {_LAYERS_MAX}")
    if head_dim % 2:
        raise fields.error(f"the size of a head must be even, is {head_dim}")
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": fields.count("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": fields.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": fields.count("context_length"),
        "tie_word_embeddings": "output.weight" not in fields.header.tensors,
        **{
            f"{token}_token_id": metadata.get(f"tokenizer.ggml.{key}_token_id")
            for token, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
        },
    }


def _rope(fields: Fields) -> dict[str, Any]:
    """Rotary position embeddings without or with linear scaling."""
    base = {"rope_theta": fields.number("rope.freq_base", _ROPE_BASE)}
    kind = fields.get("rope.scaling.type", "none")
    if kind == "none":
        for key in ("factor", "original_context_length", "finetuned"):
            fields.get(f"rope.scaling.{key}")
        return base
    if kind != "linear":
        raise fields.error(f"rope.scaling.type = {kind!r} is not supported; supported are 'none' and 'linear'")
    return base | {"rope_scaling": {"rope_type": "linear", "factor": fields.number("rope.scaling.factor")}}
