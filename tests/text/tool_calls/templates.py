"""Chat templates with the marks of well-known ones, much shortened."""

QWEN_2_5 = """
{%- if tools %}{{ '<|im_start|>system\n# Tools\n<tools>' }}
{%- for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}
{{- '\n</tools>\nReturn calls as json objects within <tool_call></tool_call> tags' }}
{{- '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role }}
{%- if message.content %}{{ '\n' + message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

QWEN_3 = (
    QWEN_2_5
    + """
{%- set old = messages[0].content.split('</think>')[-1] %}
{%- if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}
{{- '<think>\n\n</think>\n\n' }}{% endif %}"""
)

OPENS_THINKING = (
    QWEN_2_5
    + """
{%- if add_generation_prompt and enable_thinking | default(true) %}{{ '<think>\n' }}{% endif %}"""
)

LLAMA_3_1 = """
{%- for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}
{%- if message.tool_calls %}
{{- '{"name": "' + message.tool_calls[0].function.name + '", "parameters": ' }}
{{- (message.tool_calls[0].function.arguments | tojson) + '}' }}
{%- else %}{{ message.content }}{% endif %}{{ '<|eot_id|>' }}
{%- endfor %}
{%- if tools is not none %}{{ tools | tojson }}{% endif %}"""

MISTRAL_V3 = """
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools and loop.last %}{{ '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
{%- endif %}{{ '[INST] ' + message.content + '[/INST]' }}
{%- elif message.tool_calls %}{{ '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids must have length 9') }}{% endif %}
{{- call.function | tojson }}{% endfor %}{{ ']</s>' }}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS] ' + message.content + ' of ' + message.tool_call_id + '[/TOOL_RESULTS]' }}
{%- endif %}{% endfor %}"""

XML_CALLS = "{{ tools }}<tool_call><function=name><parameter=x></function></tool_call>"
NO_TOOLS = """
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

HARMONY = """
{%- macro message(head, text, end='<|end|>') %}{{ '<|start|>' + head + '<|message|>' + text + end }}
{%- endmacro %}
{%- set effort = reasoning_effort if reasoning_effort is defined else 'medium' %}
{%- set identity = model_identity if model_identity is defined else 'You are a model.' %}
{%- set about = namespace(text=identity + '\\nDate: ' + strftime_now('%Y-%m-%d') + '\\nReasoning: '
    + effort) %}
{%- for one in builtin_tools or [] %}{% set about.text = about.text + '\\n## ' + one %}
{%- endfor %}{{ message('system', about.text) }}
{%- if messages[0].role in ('system', 'developer') %}
{%- set told, rest = messages[0].content, messages[1:] %}
{%- else %}{% set told, rest = '', messages %}{% endif %}
{%- set listed = namespace(text='') %}
{%- for tool in tools or [] %}
{%- set listed.text = listed.text + '\\n// ' + tool.function.description
    + '\\ntype ' + tool.function.name + ' = (_: ' + tool.function.parameters|tojson + ') => any;' %}
{%- endfor %}
{%- if told or tools %}{{ message('developer', told + listed.text) }}{% endif %}
{%- set called = namespace(name=none) %}
{%- for m in rest %}
{%- if m.role == 'assistant' %}
{%- for text in (m.content, m.thinking or '') if '<|channel|>' in text %}
{{- raise_exception('pass thinking and content apart, without channels') }}{% endfor %}
{%- if 'tool_calls' in m %}
{%- set answered = namespace(yes=false) %}
{%- for later in rest[loop.index:] if later.role == 'assistant' and 'tool_calls' not in later %}
{%- set answered.yes = true %}{% endfor %}
{%- if m.content and m.thinking %}{{ raise_exception('thinking or content, not both') }}{% endif %}
{%- if (m.thinking or m.content) and not answered.yes %}
{{- message('assistant<|channel|>analysis', m.thinking or m.content) }}{% endif %}
{%- set called.name = m.tool_calls[0].function.name %}
{%- set arguments = m.tool_calls[0].function.arguments|tojson %}
{{- message('assistant to=functions.' + called.name + '<|channel|>commentary json', arguments,
    '<|call|>') }}
{%- elif loop.last and not add_generation_prompt %}
{%- if 'thinking' in m %}{{ message('assistant<|channel|>analysis', m.thinking) }}{% endif %}
{{- message('assistant<|channel|>final', m.content, '<|return|>') }}
{%- else %}{{ message('assistant<|channel|>final', m.content) }}{% set called.name = none %}
{%- endif %}
{%- elif m.role == 'tool' %}
{%- if called.name is none %}{{ raise_exception('a result without a call') }}{% endif %}
{{- message('functions.' + called.name + ' to=assistant<|channel|>commentary', m.content|tojson) }}
{%- elif m.role == 'user' %}{{ message('user', m.content) }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
HARMONY_ARGUMENTS = HARMONY.replace(
    "{%- endfor %}\n{%- if told or tools %}",
    """
{%- for name, one in (tool.function.parameters.properties or {}).items() %}
{%- set listed.text = listed.text + '\\n// ' + one.description + '\\n' + name + ': ' + one.type %}
{%- endfor %}
{%- endfor %}
{%- if told or tools %}""",
)
"""The same with a comment for each argument, which must have one."""
