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
