"""Tiny random checkpoints of many architectures, and their tokens by transformers itself."""

import contextlib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

from dataplane.engines.interface import EngineRequest
from dataplane.protocol.messages import ModelSpec

VOCABULARY = 97
CONTEXT_TOKENS = 256

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": CONTEXT_TOKENS,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

_SPECIFIC: dict[str, dict[str, Any]] = {
    "cohere2": {"sliding_window": 9, "sliding_window_pattern": 2},
    "gemma2": {
        "sliding_window": 9,
        "query_pre_attn_scalar": 12,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 1.0,
    },
    "gemma3_text": {
        "sliding_window": 9,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 12,
        "tie_word_embeddings": False,
    },
    "glm4": {"partial_rotary_factor": 0.5},
    "granite": {
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.6,
    },
    "internlm3": {"qkv_bias": True, "bias": True},
    "llama": {},
    "mistral": {"sliding_window": 9},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 40, "sliding_window": 9},
    "olmo2": {"num_hidden_layers": 2},
    "phi3": {"sliding_window": 9},
    "qwen2": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1, "tie_word_embeddings": True},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    "smollm3": {"no_rope_layers": [1, 1, 0]},
    "starcoder2": {"sliding_window": 9, "num_key_value_heads": 4},
}

ARCHITECTURES = tuple(_SPECIFIC)


def tiny_config(architecture: str, **changes: Any) -> Any:
    """A config of a few thousand parameters whose every peculiarity (window, softcap, ...) shows within 30 tokens."""
    return AutoConfig.for_model(architecture, **{**_SIZES, **_SPECIFIC[architecture], **changes})


def save_tiny(architecture: str, folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """A random checkpoint in Hugging Face format, the same for the same arguments."""
    torch.manual_seed(seed)
    build: Any = AutoModelForCausalLM.from_config
    model = build(tiny_config(architecture, **changes), dtype=torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight *= 0.1  # or a token would mostly predict itself, whatever attention says
        for name, parameter in model.named_parameters():
            if ".layers." in name and parameter.dim() == 1:  # zeros and ones at first: a mistake would not show
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(folder)
    return folder


def spec_of(name: str, folder: Path, *, context_tokens: int = CONTEXT_TOKENS) -> ModelSpec:
    """The model spec of such a checkpoint."""
    return ModelSpec(name=name, path=str(folder), weights_bytes=1, kv_bytes_per_token=1, context_tokens=context_tokens)


def greedy_tokens(folder: Path, prompt: Sequence[int], max_tokens: int) -> tuple[int, ...]:
    """The tokens of transformers' own `generate`, unbatched, without the end-of-sequence token."""
    model = _reference(folder)
    prompt_ids = torch.tensor([list(prompt)])
    eos = model.generation_config.eos_token_id
    made = model.generate(
        input_ids=prompt_ids,
        attention_mask=torch.ones_like(prompt_ids),
        do_sample=False,
        max_new_tokens=max_tokens,
        pad_token_id=0,
    )[0, len(prompt) :].tolist()
    stops = {eos} if isinstance(eos, int) else set(eos or ())
    return tuple(token for token in made if token not in stops)


def token_logprobs(folder: Path, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """The log probability of each of these tokens after a prompt and those before it."""
    with torch.no_grad():
        logits = _reference(folder)(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(dim=-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


class OpenAiPenalties(LogitsProcessor):
    """OpenAI's frequency and presence penalties, counted anew for each token: transformers has none."""

    def __init__(self, prompt_tokens: int, frequency: float, presence: float) -> None:
        self._prompt_tokens = prompt_tokens
        self._frequency = frequency
        self._presence = presence

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = input_ids[0, self._prompt_tokens :].bincount(minlength=scores.shape[1])
        return scores - counts * self._frequency - (counts > 0) * self._presence


def adjusted_answer(folder: Path, request: EngineRequest) -> tuple[tuple[int, ...], torch.Tensor]:
    """What transformers' own `generate` makes of a greedy request with its logits processors: the tokens without the
    end of sequence, and the log probabilities `[tokens, vocabulary]` of the model's own distribution at each.
    """
    model = _reference(folder)
    prompt = torch.tensor([request.prompt])
    penalties = OpenAiPenalties(len(request.prompt), request.frequency_penalty, request.presence_penalty)
    made = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=request.max_tokens,
        min_new_tokens=request.min_tokens or None,
        repetition_penalty=request.repetition_penalty,
        sequence_bias={(token,): bias for token, bias in request.logit_bias} or None,
        logits_processor=LogitsProcessorList([penalties]),
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = made.sequences[0, len(request.prompt) :].tolist()
    if tokens[-1] == model.generation_config.eos_token_id:
        tokens.pop()
    return tuple(tokens), torch.cat(made.logits[: len(tokens)]).float().log_softmax(dim=-1)


@cache
def _reference(folder: Path) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


@contextlib.contextmanager
def another_default(dtype: torch.dtype) -> Iterator[None]:
    """Another default dtype of torch, as while another thread builds a model: it is one for the whole process."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
