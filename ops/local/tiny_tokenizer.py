"""The tokenizer of the demo models: trained on a text in this file, so the same on every machine."""

from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

VOCABULARY = 512
CONTEXT_TOKENS = 2048
END_TOKEN = "<|end|>"  # noqa: S105  # a token of text, not of access
ROLE_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

_TEXT = """
The tide comes in and the tide goes out, and the harbour never sleeps. In the morning the boats lie on the sand; at
noon they float; in the evening they are gone. Nobody tells the water what to do, yet everybody knows when it will
come: there is a table on the wall of the harbour office, with the hours of every day of the year.
Requests are like that. They rise when people wake, they fall when people sleep, and between the continents the wave
travels with the sun. A model that is busy in one region is idle in another. What should we do with the machines that
wait? We could let them wait. We could turn them off and on again, which takes ten minutes. Or we could let many models
share one machine, and switch between them so quickly that nobody notices: one token for you, one token for me.
How are you today? I am fine, thank you. What is the weather like? It is raining, and the wind comes from the west.
Please write a short story about a lighthouse. Once upon a time there was a lighthouse that was afraid of the dark.
Please summarise the report in three sentences. Please translate this text. Please explain how a pump works.
for i in range(10): print(i) def add(a, b): return a + b if x > 0 else 0 import json, sys, time, math 0 1 2 3 4 5 6 7 8
The first, the second, the third; one, two, three, four, five, six, seven, eight, nine, ten, eleven and twelve.
"""


def train_tokenizer() -> Any:
    """A byte-level BPE tokenizer of `VOCABULARY` tokens; every byte is one, so any text can be encoded."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY,
        show_progress=False,
        special_tokens=[END_TOKEN, *ROLE_TOKENS],
        initial_alphabet=sorted(ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(_TEXT.splitlines(), trainer)
    assert tokenizer.get_vocab_size() == VOCABULARY, tokenizer.get_vocab_size()
    return tokenizer


def printable_ids(tokenizer: Any) -> list[int]:
    """The tokens that decode to printable ASCII, alone and wherever they stand."""
    texts = {token: tokenizer.decode([token]) for token in range(VOCABULARY)}
    return [token for token, text in texts.items() if text and all(" " <= letter <= "~" for letter in text)]


def tokenizer_config() -> dict[str, Any]:
    """What `tokenizer_config.json` says."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_TOKEN,
        "eos_token": END_TOKEN,
        "pad_token": END_TOKEN,
        "model_max_length": CONTEXT_TOKENS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
