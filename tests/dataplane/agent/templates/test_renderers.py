"""Template processes: what templates of transformers may use, and what hostile ones may not do."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from dataplane.agent.templates.renderers import (
    BrokenTemplateError,
    ChatTemplateError,
    InvalidTemplateError,
    TemplateRenderers,
)
from dataplane.protocol.errors import BadRequestError, DataplaneError, OverloadedError
from tests.event_loop import PATIENCE_S, asynchronous

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@asynccontextmanager
async def running(processes_max: int = 1, time_max_s: float = PATIENCE_S) -> AsyncIterator[TemplateRenderers]:
    renderers = TemplateRenderers(processes_max=processes_max, time_max_s=time_max_s)
    try:
        yield renderers
    finally:
        await renderers.close()


@asynchronous
async def test_what_transformers_offers_templates() -> None:
    async with running() as renderers:
        for source, text in {
            "{{ {'a': '<é>'} | tojson }}": '{"a": "<é>"}',
            "{{ {'b': 1, 'a': [2]} | tojson(indent=1, sort_keys=true) }}": '{\n "a": [\n  2\n ],\n "b": 1\n}',
            "{{ {'a': 'é'} | tojson(ensure_ascii=true, separators=(',', ':')) }}": '{"a":"\\u00e9"}',
            "{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}": "1",
            "a\n{% generation %}{{ x }}{% endgeneration %}\nb": "a\n7b",
            "{{ strftime_now('%Y') | length }}{{ missing }}": "4",
            "{% set ns = namespace(a=1) %}{% set ns.a = ns.a + 1 %}{{ ns.a }}": "2",
            "{{ dict(a=1).items() | list }}{{ 'a b'.split() | last }}": "[('a', 1)]b",
        }.items():
            assert await renderers.render(source, {"x": 7}) == text
        assert await renderers.variables("{% set a = 1 %}{{ a }}{{ tools }}{{ range(3) }}") == frozenset({"tools"})


@pytest.mark.parametrize(
    ("source", "kind", "words"),
    [
        ("{{ raise_exception('no system role') }}", BadRequestError, "no system role"),
        ("{{ x.y.z }}", BrokenTemplateError, "no attribute"),
        ("{{ ''.__class__.__mro__ }}", BrokenTemplateError, "unsafe"),
        ("{% if %}", InvalidTemplateError, "line 1"),
        ("{{ 'x' * 10**10 }}", ChatTemplateError, "more memory"),
        ("{{ '%10000000000d' % 1 }}", ChatTemplateError, "more memory"),
        ("{% set n = namespace(x='x' * 999) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
         ChatTemplateError, "more memory"),
        ("{% for i in range(99999) %}{% for j in range(999) %}xxxxxxxxx{% endfor %}{% endfor %}",
         ChatTemplateError, "longer than"),
        ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(0) }}", ChatTemplateError, "nested"),
        ("{{" + "(" * 5000 + "1" + ")" * 5000 + "}}", ChatTemplateError, "nested"),
    ],
)  # fmt: skip
@asynchronous
async def test_a_template_at_fault(source: str, kind: type[DataplaneError], words: str) -> None:
    async with running() as renderers:
        for _ in range(2):
            with pytest.raises(kind, match=words) as refused:
                await renderers.render(source, {"x": "text"})
            assert refused.value.status == 400
            assert await renderers.render("{{ x }}", {"x": "fine"}) == "fine"


@pytest.mark.parametrize("value", [{"deep": [10**30]}, "\ud800"])
@asynchronous
async def test_a_variable_that_no_process_can_be_sent_is_named(value: object) -> None:
    async with running() as renderers:
        for name, param in {"x": "chat_template_kwargs.x", "xml_tools": "tools", "messages": "messages"}.items():
            with pytest.raises(BadRequestError, match="64 bits") as refused:
                await renderers.render("{{ x }}", {"y": 1, name: value})
            assert refused.value.param == param


@asynchronous
async def test_a_template_without_end_is_ended_and_others_are_rendered_meanwhile() -> None:
    async with running(processes_max=2, time_max_s=2.0) as renderers:
        assert await renderers.render("{{ x }}", {"x": "warm"}) == "warm"
        endless = [asyncio.create_task(renderers.render(ENDLESS, {})) for _ in range(4)]
        await asyncio.sleep(0)
        while not endless[0].done():
            assert await renderers.render("{{ x }}", {"x": "fine"}) == "fine"
        results = await asyncio.gather(*endless, return_exceptions=True)
        assert {type(result) for result in results} <= {ChatTemplateError, OverloadedError}
        assert any(isinstance(result, ChatTemplateError) and "took over 2 s" in result.message for result in results)


@asynchronous
async def test_a_request_that_is_given_up_ends_its_rendering() -> None:
    async with running() as renderers:
        task = asyncio.create_task(renderers.render(ENDLESS, {}))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await renderers.render("{{ x }}", {"x": "fine"}) == "fine"
