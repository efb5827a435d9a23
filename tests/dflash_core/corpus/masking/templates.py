"""Small chat templates of our own, one for each trap that real ones hold."""

_TURN = "{{ '<|im_start|>' + m.role + '\n' }}"
_GENERATE = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"

PLAIN = (
    "{% for m in messages %}" + _TURN + "{{ m.content + '<|im_end|>\n' }}{% endfor %}" + _GENERATE
)

MARKED = (
    "{% for m in messages %}" + _TURN + "{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}" + _GENERATE
)

# Answers lose their outer white space; the prompt keeps its own.
TRIMS_ANSWERS = (
    "{% for m in messages %}" + _TURN + "{% if m.role == 'assistant' %}{{ m.content | trim }}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}" + _GENERATE
)

# An empty thought is put before the last answer only, as Qwen3 does; earlier thoughts vanish.
THINKS_LAST = (
    "{% for m in messages %}" + _TURN + "{% if m.role == 'assistant' and loop.last %}"
    "{{ '<think>\n' + (m.reasoning_content | default('')) + '\n</think>\n\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}" + _GENERATE + "{% if add_generation_prompt "
    "and enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}"
)

# The generation prompt opens the thought, so its opening tag is never generated, as in Qwen3.5.
OPENS_THOUGHT = (
    "{% for m in messages %}" + _TURN + "{% if m.role == 'assistant' and loop.last %}"
    "{{ '<think>\n' + (m.reasoning_content | default('')) + '\n</think>\n\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}" + _GENERATE + "{% if add_generation_prompt %}"
    "{{ '<think>\n' }}{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '\n</think>\n\n' }}{% endif %}{% endif %}"
)

# A closing token of its own for the last answer, as in Harmony.
LAST_END_DIFFERS = (
    "{% for m in messages %}" + _TURN + "{{ m.content }}"
    "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|im_end|>' }}"
    "{% endfor %}" + _GENERATE
)

# A space before the closing token, as in Llama 2, and no line breaks.
SPACED_END = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + ' ' + m.content + ' <|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant ' }}{% endif %}"
)

# No control token closes a turn.
NO_END = "{% for m in messages %}{{ '<|im_start|>' + m.role + ': ' + m.content }}{% endfor %}"

# An answer ends with the token that opens the next turn, as in GLM.
NEXT_ROLE_ENDS = (
    "{% set opens = {'user': '<|im_start|>', 'assistant': '<|return|>', 'tool': '<|im_end|>'} %}"
    "{% for m in messages %}{{ opens[m.role] + '\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|return|>\n' }}{% endif %}"
)

DROPS_UNKNOWN_ROLES = (
    "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}"
    + _TURN
    + "{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    + _GENERATE
)

REFUSES_LATE_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    + _TURN
    + "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    + _GENERATE
)

CALLS_TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}" + _TURN + "{{ m.content }}"
    "{% for c in m.tool_calls %}{{ '\n<tool_call>' + (c.function | tojson) + '</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}" + _GENERATE
)

# What every one of them renders in the same way as the conversation says it.
FAITHFUL = {
    "plain": PLAIN,
    "marked": MARKED,
    "trims answers": TRIMS_ANSWERS,
    "thinks last": THINKS_LAST,
    "opens thought": OPENS_THOUGHT,
    "last end differs": LAST_END_DIFFERS,
    "spaced end": SPACED_END,
    "no end": NO_END,
    "drops unknown roles": DROPS_UNKNOWN_ROLES,
    "refuses late system": REFUSES_LATE_SYSTEM,
    "calls tools": CALLS_TOOLS,
}
