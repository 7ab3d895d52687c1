"""The names of the formats in which models write tool calls and reasoning: vLLM's names, where it has them."""

from typing import Literal

ToolParserName = Literal["hermes", "llama3_json", "mistral", "phi4_mini_json", "deepseek_v3", "json", "none"]
"""How tool calls are written. json: as JSON without markers; none: they are not looked for."""
ReasoningParserName = Literal["qwen3", "deepseek_r1", "mistral", "none"]
"""How reasoning is written. qwen3: between <think> tags; deepseek_r1: so, and an answer always begins with it; none: it
is content.
"""
