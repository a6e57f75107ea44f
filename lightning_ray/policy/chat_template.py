"""The chat template of policies that are made here: ChatML turns, with tools in the Hermes style (JSON in tags).

A turn is `<|im_start|>ROLE`, a newline, the content, `<|im_end|>` and a newline. Answers end with `<|im_end|>`, which
is the end-of-sequence token. A conversation that goes on renders to the text of the one before plus the new turns:
nothing is stripped or rewritten. vLLM reads the tool calls with its parser `hermes`.
"""

END_OF_TURN = "<|im_end|>"
START_OF_TURN = "<|im_start|>"
PADDING = "<|pad|>"
ANSWER_START = f"{START_OF_TURN}assistant\n"

CHAT_TEMPLATE = """\
{%- set leading = messages[0].content if messages and messages[0].role == 'system' else '' -%}
{%- if tools -%}
    {{- '<|im_start|>system\\n' + leading + ('\\n\\n' if leading else '') -}}
    {{- 'Call a tool with one JSON object in tags: ' -}}
    {{- '<tool_call>{"name": NAME, "arguments": {...}}</tool_call>\\n<tools>' -}}
    {%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
    {{- '\\n</tools><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'system' and loop.first and tools -%}
    {%- elif message.role == 'tool' -%}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' -}}
    {%- else -%}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') -}}
        {%- for call in message.tool_calls or [] -%}
            {%- set function = call.function or call -%}
            {{- ('\\n' if message.content or not loop.first else '') + '<tool_call>\\n{"name": ' -}}
            {{- (function.name | tojson) + ', "arguments": ' -}}
            {{- (function.arguments if function.arguments is string else function.arguments | tojson) -}}
            {{- '}\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
