"""Chat templates written for tests, in the style of each family: what they ask of a conversation, and their markers."""

CHATML = """{%- if tools %}<|im_start|>system
{{ messages[0].content if messages[0].role == 'system' }}
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif -%}
{%- for message in messages if message.role != 'system' -%}
{%- if message.role == 'tool' -%}
<|im_start|>user
<tool_response>{{ message.content }}</tool_response><|im_end|>
{% else -%}
<|im_start|>{{ message.role }}
{% if message.reasoning_content is defined %}<think>{{ message.reasoning_content }}</think>{% endif %}
{%- if message.content %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] -%}
{%- if call.function is defined %}{% set call = call.function %}{% endif -%}
<tool_call>
{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
"""Qwen's and Hermes' style."""

LLAMA = """{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = strftime_now("%d %b %Y") %}{% endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{ "Environment: ipython\\n" }}{% endif %}
{{- "Today Date: " + date_string + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {%- if loop.first and tools is not none %}
            {%- for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}
        {%- endif %}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("only one call at once") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}{{ "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" + message.content + "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
"""Llama 3's style: no more than one call in a message."""

MISTRAL = """{%- set ns = namespace(turn=0) %}
{{- bos_token }}
{%- for message in messages %}
    {%- if (message.role == 'user' or (message.role == 'assistant' and not message.tool_calls)) %}
        {%- if (message.role == 'user') != (ns.turn % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
        {%- set ns.turn = ns.turn + 1 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if loop.last and tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if not call.id is defined or call.id | length != 9 %}{{ raise_exception('9 signs') }}{% endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}{{ ', ' if not loop.last }}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | tojson + ', "call_id": "' + message.tool_call_id + '"}' }}
    {%- else %}
        {{- ' ' + message.content + eos_token }}
    {%- endif %}
{%- endfor %}"""
"""Mistral's style: strict about turns and ids."""

DEEPSEEK = """{{ bos_token }}{% for message in messages %}
{%- if message['role'] == 'user' %}{{ '<User>' + message['content'] }}
{%- elif message['role'] == 'assistant' and message['content'] is none %}
{%- for call in message['tool_calls'] -%}
{{ '<\uff5ctool▁call▁begin\uff5c>' + call['type'] + '<\uff5ctool▁sep\uff5c>'
   + call['function']['name'] + '\\n```json\\n' + call['function']['arguments']
   + '\\n```<\uff5ctool▁call▁end\uff5c>' }}{% endfor %}
{%- elif message['role'] == 'assistant' %}{{ '<Assistant>' + message['content'].split('</think>')[-1] }}
{%- else %}{{ '<Result>' + message['content'] }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<Assistant><think>\\n' }}{% endif %}"""
"""DeepSeek R1's style: arguments are text, a message with calls has no content, and the prompt opens the reasoning."""

SMOLLM3 = """{%- if xml_tools -%}<|im_start|>system
{% for tool in xml_tools %}{{ tool }}{% endfor %}
<tool_call>...</tool_call><|im_end|>
{% endif -%}
{%- for message in messages -%}
{% generation %}<|im_start|>{{ message.role }}
{{ message.content if message.content is string else '' }}<|im_end|>
{% endgeneration %}{%- endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if not enable_thinking | default(true) %}<think></think>{% endif %}{% endif %}"""
"""SmolLM3's style: it names its tools otherwise."""

PHI = """{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}
{%- if loop.first and tools %}{{ '<|tool|>' + tools | tojson + '<|/tool|>' }}{% endif %}{{ '<|end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
"""Phi's style: every message has a content."""

PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[bot]"
"""Knows nothing of tools."""
