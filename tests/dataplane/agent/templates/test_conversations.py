"""Conversations with tools and reasoning in the chat templates of each family, and back out of their answers."""

import json
import re
from pathlib import Path

import pytest

from dataplane.agent.parsing.families import families_of
from dataplane.agent.parsing.tool_calls import ToolCallParser
from dataplane.agent.templates.chat_template import ChatTemplate
from dataplane.protocol.errors import BadRequestError, ModelLoadError
from dataplane.protocol.messages import ChatMessage, Tool, ToolCall
from tests.dataplane.agent.templates import styles
from tests.dataplane.chats import make_template, prompt_text
from tests.dataplane.replay_node import model

WEATHER = Tool(
    name="weather",
    description="The weather of a <city>",
    parameters={"type": "object", "properties": {"city": {"type": "string"}}},
)
ASKED = (ChatMessage(role="user", content="Is it raining in Kyōto?"),)
CALLED = ChatMessage(
    role="assistant",
    tool_calls=(ToolCall(id="call_0123456789", name="weather", arguments='{"city": "Kyōto"}'),),
)
RESULT = ChatMessage(role="tool", tool_call_id="call_0123456789", content="no")
TURNS = (*ASKED, CALLED, RESULT)
STYLES = {
    "hermes": styles.CHATML,
    "llama3_json": styles.LLAMA,
    "mistral": styles.MISTRAL,
    "deepseek_v3": styles.DEEPSEEK,
}


@pytest.mark.parametrize("family", STYLES)
def test_what_a_model_writes_is_what_its_template_writes_of_it(family: str) -> None:
    """The call of a prompt's history, read by the parser that the template suggests, is the call again."""
    template = make_template(STYLES[family], bos_token="<s>", eos_token="</s>")
    text = prompt_text(template, TURNS, [WEATHER], variables={"date_string": "1 May 2026"})
    tools = families_of(model(), template).tools
    assert tools is not None
    _, marker, written = text.partition(tools.form.openings[0] if not tools.form.bare else '{"name": "weather"')
    parser = ToolCallParser(tools.form, frozenset({"weather"}), parallel=True)
    _, deltas = parser.feed(marker + written)
    assert [delta.name for delta in deltas if delta.name] == ["weather"]
    assert json.loads("".join(delta.arguments for delta in deltas)) == {"city": "Kyōto"}
    assert written.count("no") == 1


def test_tools_and_results_in_the_style_of_qwen() -> None:
    text = prompt_text(make_template(styles.CHATML), TURNS, [WEATHER], variables={"enable_thinking": False})
    schema = {
        "type": "function",
        "function": {"name": WEATHER.name, "description": WEATHER.description, "parameters": WEATHER.parameters},
    }
    assert json.dumps(schema) in text
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Kyōto"}}\n</tool_call><|im_end|>' in text
    assert text.endswith("<tool_response>no</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_reasoning_of_earlier_turns_is_given_back() -> None:
    thought = ChatMessage(role="assistant", content="No.", reasoning="It is May.")
    assert "<think>It is May.</think>No." in prompt_text(make_template(styles.CHATML), [*ASKED, thought])


def test_mistral_gets_short_ids_and_its_turns() -> None:
    template = make_template(styles.MISTRAL, bos_token="<s>", eos_token="</s>")
    text = prompt_text(template, TURNS, [WEATHER])
    written = json.loads(text.partition("[TOOL_CALLS] ")[2].partition("</s>")[0])
    short = written[0]["id"]
    assert (len(short), short.isalnum()) == (9, True)
    assert f'"call_id": "{short}"' in text
    kept = ChatMessage(role="assistant", tool_calls=(ToolCall(id="Abc123xyz", name="weather", arguments="{}"),))
    assert "Abc123xyz" in prompt_text(template, [*ASKED, kept])
    with pytest.raises(BadRequestError, match="roles must alternate") as refused:
        prompt_text(template, [*ASKED, *ASKED])
    assert refused.value.param == "messages"


def test_deepseek_gets_arguments_as_text_and_no_content() -> None:
    template = make_template(styles.DEEPSEEK, bos_token="<s>")
    text = prompt_text(template, TURNS)
    assert 'weather\n```json\n{"city": "Kyōto"}\n```' in text
    assert text.endswith("<Result>no<Assistant><think>\n")
    assert families_of(model(), template).reasoning is not None


def test_tools_that_a_template_names_otherwise_reach_it() -> None:
    template = make_template(styles.SMOLLM3)
    text = prompt_text(template, ASKED, [WEATHER])
    assert "'name': 'weather'" in text
    assert text.count("<|im_start|>") == 3


def test_the_date_is_today_unless_the_request_sets_it() -> None:
    template = make_template(styles.LLAMA)
    assert "Today Date: 1 May 2026<|eot_id|>" in prompt_text(template, ASKED, variables={"date_string": "1 May 2026"})
    today = prompt_text(template, ASKED)
    assert re.search(r"Today Date: \d\d \w+ 20\d\d<", today)
    assert "ipython" not in today


def test_calls_are_content_where_a_template_knows_none() -> None:
    text = prompt_text(make_template(styles.PHI), (*ASKED, CALLED, RESULT), [WEATHER])
    call = '<|assistant|>{"name": "weather", "arguments": {"city": "Kyōto"}}<|end|>'
    assert text.endswith(f"{call}<|user|>Result of weather: no<|end|><|assistant|>")
    assert text.count("<|tool|>") == 1


@pytest.mark.parametrize("template", [None, make_template(styles.PLAIN)])
def test_a_model_whose_template_knows_no_tools_is_told_of_them(template: ChatTemplate | None) -> None:
    text = prompt_text(template, TURNS, [WEATHER])
    assert '{"name": "weather", "description": "The weather of a <city>"' in text
    assert '{"name": "function name", "arguments": {"parameter name": "value"}}' in text
    assert '{"name": "weather", "arguments": {"city": "Kyōto"}}' in text
    assert "Result of weather: no" in text
    system = ChatMessage(role="system", content="Be brief.")
    text = prompt_text(template, [system, *ASKED], [WEATHER])
    assert (text.count("system"), text.find("Be brief.\n\nYou may call") > 0) == (1, True)


def test_arguments_that_are_no_object_stay_as_the_model_wrote_them() -> None:
    broken = ChatMessage(role="assistant", tool_calls=(ToolCall(id="c", name="weather", arguments='{"city": '),))
    assert json.dumps('{"city": ') in prompt_text(make_template(styles.CHATML), [*ASKED, broken])


@pytest.mark.parametrize("arguments", ['{"city": 1' + "0" * 40 + "}", '{"city": "\\ud800"}'])
def test_arguments_that_no_template_can_be_given_stay_text(arguments: str) -> None:
    call = ChatMessage(role="assistant", tool_calls=(ToolCall(id="c", name="weather", arguments=arguments),))
    assert json.dumps(arguments) in prompt_text(make_template(styles.CHATML), [*ASKED, call])


@pytest.mark.parametrize("name", ["messages", "tools", "bos_token", "add_generation_prompt", "_x", "range", "a b"])
def test_a_request_may_not_set_what_the_template_is_given(name: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        prompt_text(make_template(styles.PLAIN), ASKED, variables={name: "x"})
    assert refused.value.param == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize(
    ("source", "tools", "reasoning"),
    [(source, name, None) for name, source in STYLES.items() if name != "deepseek_v3"]
    + [(styles.PHI, "json", None), (styles.PLAIN, "json", None), (styles.SMOLLM3, "hermes", "<think>")],
)
def test_a_template_shows_its_family(source: str, tools: str, reasoning: str | None) -> None:
    families = families_of(model(), make_template(source))
    named = families_of(model(tool_parser=tools), None)
    assert families.tools is named.tools
    if source != styles.CHATML:
        assert (families.reasoning.opening if families.reasoning else None) == reasoning


def test_a_model_says_otherwise() -> None:
    template = make_template(styles.CHATML)
    silent = families_of(model(tool_parser="none", reasoning_parser="none"), template)
    assert (silent.tools, silent.reasoning) == (None, None)
    reasoning = families_of(model(reasoning_parser="deepseek_r1"), template).reasoning
    assert reasoning is not None
    assert reasoning.assumed
    with pytest.raises(ModelLoadError, match=r"tool_parser must be one of hermes, .*none, not bark"):
        families_of(model(tool_parser="bark"), template)


def test_the_template_of_a_folder(tmp_path: Path) -> None:
    config = tmp_path / "tokenizer_config.json"
    assert ChatTemplate.of_folder(tmp_path) is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "processor"}))
    config.write_text(json.dumps({"bos_token": {"content": "<s>"}, "pad_token": None}))
    found = ChatTemplate.of_folder(tmp_path)
    assert found is not None
    assert (found.source, found.special_tokens) == ("processor", {"bos_token": "<s>", "eos_token": ""})
    named = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    config.write_text(json.dumps({"chat_template": named}))
    found = ChatTemplate.of_folder(tmp_path)
    assert found is not None
    assert (found.source, found.tool_source) == ("one", "two")
    (tmp_path / "chat_template.jinja").write_text("file")
    found = ChatTemplate.of_folder(tmp_path)
    assert found is not None
    assert (found.source, found.tool_source) == ("file", "two")
    config.write_text(json.dumps({"chat_template": [{"name": "default"}]}))
    with pytest.raises(ModelLoadError, match="cannot be read"):
        ChatTemplate.of_folder(tmp_path)
