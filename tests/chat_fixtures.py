"""A tokenizer built in this process, chat templates of every kind, and short helpers for tests."""

from functools import lru_cache
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from dspark.chat import ChatEncoder, Conversation

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<bos>", "<eos>", "<|eot|>"]

_CORPUS = [
    "The quick brown fox jumps over the lazy dog. What is the capital of France? Paris.",
    "user assistant system tool think reasoning answer question hello world real fake",
    '{"name": "weather", "arguments": {"city": "Oslo"}}',
    "One two three four five six seven eight nine ten.\n\nAnd so on, and so forth.",
]


@lru_cache
def backend_json() -> str:
    """Train a byte-level BPE whose offsets a post-processor trims, as GPT-2's does."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_CORPUS * 4, trainer)
    return str(backend.to_str())


def tiny_tokenizer(template: str | None = None, **settings: Any) -> PreTrainedTokenizerFast:
    """Return a fresh tokenizer; `settings` override its special tokens, sides and limits."""
    options = {
        "eos_token": "<|im_end|>",
        "bos_token": "<bos>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": ["<|im_start|>", "<eos>", "<|eot|>"],
        **settings,
    }
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(backend_json()), **options
    )
    tokenizer.chat_template = TEMPLATES["chatml"] if template is None else template
    return tokenizer


def encode(template: str, row: dict[str, Any], *, seq_length: int = 4096, **options: Any):
    """Encode one row under a named or literal template with the tiny tokenizer."""
    return encoder(template, seq_length=seq_length, **options).encode(row)


def encoder(template: str, *, seq_length: int = 4096, **options: Any) -> ChatEncoder:
    return ChatEncoder(
        tiny_tokenizer(TEMPLATES.get(template, template)), seq_length=seq_length, **options
    )


def text(conversation: Conversation) -> str:
    return decode(conversation.input_ids)


def supervised(conversation: Conversation) -> list[str]:
    """Return the text of each unbroken run of supervised tokens."""
    runs, start = [], None
    for i, bit in enumerate([*conversation.loss_mask, 0]):
        if bit and start is None:
            start = i
        elif not bit and start is not None:
            runs.append(decode(conversation.input_ids[start:i]))
            start = None
    return runs


def decode(ids: np.ndarray) -> str:
    decoded = tiny_decoder().decode(ids.tolist(), skip_special_tokens=False)
    assert isinstance(decoded, str)
    return decoded


@lru_cache
def tiny_decoder() -> Tokenizer:
    return Tokenizer.from_str(backend_json())


def chat(*contents: str, roles: str = "ua") -> dict[str, Any]:
    """Return a row: the contents in turn, by u(ser), a(ssistant), s(ystem), t(ool)."""
    names = {"u": "user", "a": "assistant", "s": "system", "t": "tool"}
    cycle = roles if len(roles) == len(contents) else roles * len(contents)
    return {
        "messages": [
            {"role": names[role], "content": content}
            for role, content in zip(cycle, contents, strict=False)
        ]
    }


_PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

TEMPLATES = {
    "chatml": (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
        "{% endfor %}" + _PROMPT
    ),
    # The template of SmolLM2: a system prompt of its own, printed inside the loop.
    "default-system": (
        "{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "<|im_start|>system\nBe helpful.<|im_end|>\n{% endif %}"
        "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}" + _PROMPT
    ),
    # The rules of Qwen3: reasoning is printed only behind the last question of the user.
    "qwen3": (
        "{% set ns = namespace(seek=true, last=messages|length - 1) %}"
        "{% for m in messages[::-1] %}{% set i = (messages|length - 1) - loop.index0 %}"
        "{% if ns.seek and m.role == 'user' and not m.content.startswith('<tool_response>') %}"
        "{% set ns.seek = false %}{% set ns.last = i %}{% endif %}{% endfor %}"
        "{% for m in messages %}"
        "{% if m.role == 'assistant' %}"
        "{% set content = m.content if m.content is string else '' %}"
        "{% set reason = m.reasoning_content if m.reasoning_content is string else '' %}"
        "<|im_start|>assistant\n"
        "{% if loop.index0 > ns.last and (loop.last or reason) %}"
        "<think>\n{{ reason.strip('\\n') }}\n</think>\n\n{{ content.lstrip('\\n') }}"
        "{% else %}{{ content }}{% endif %}"
        '{% for c in m.tool_calls or [] %}\n<tool_call>\n{"name": "{{ c.function.name }}", '
        '"arguments": {% if c.function.arguments is string %}{{ c.function.arguments }}'
        "{% else %}{{ c.function.arguments | tojson }}{% endif %}}\n</tool_call>{% endfor %}"
        "<|im_end|>\n"
        "{% elif m.role == 'tool' %}"
        "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
        "\n<tool_response>\n{{ m.content }}\n</tool_response>"
        "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
        "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if enable_thinking is defined and enable_thinking is false %}"
        "<think>\n\n</think>\n\n{% endif %}{% endif %}"
    ),
    "think": (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m.reasoning_content %}"
        "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m['content'] }}<|im_end|>\n"
        "{% endfor %}" + _PROMPT
    ),
    "tag": (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
        "{%- generation -%}{{ m['content'] }}<|im_end|>{% endgeneration %}\n"
        "{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}" + _PROMPT
    ),
    "tag-noend": (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
        "{% generation %}{{ m['content'] }}{% endgeneration %}<|im_end|>\n"
        "{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}" + _PROMPT
    ),
    "strict": (
        "{% for m in messages %}{% if m.role == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + _PROMPT
    ),
    "nouser": (
        "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
        "{{ raise_exception('No user message') }}{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        + _PROMPT
    ),
    "nextrole": (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    ),
    "date": (
        "<|im_start|>system\nToday is {{ strftime_now('%d %B %Y') }}.<|im_end|>\n"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    ),
    "items": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}"
        "{% for key, value in c.function.arguments.items() %}<{{ key }}>{{ value }}{% endfor %}"
        "{% endfor %}<|im_end|>\n{% endfor %}" + _PROMPT
    ),
    "tojson": (
        "{% if tools is not none %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>"
        "{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}"
        "({{ c.function.arguments | tojson }}){% endfor %}<|im_end|>\n{% endfor %}" + _PROMPT
    ),
    "pasted": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and m.content is none %}{% for c in m.tool_calls %}"
        "{{ c.function.name + '(' + c.function.arguments + ')' }}{% endfor %}"
        "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}" + _PROMPT
    ),
    "llama3": (
        "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}<|im_end|>\n\n"
        "{{ m.content | trim }}<|eot|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant<|im_end|>\n\n{% endif %}"
    ),
    "gemma": (
        "{{ bos_token }}{% if messages[0].role == 'system' %}"
        "{% set first = messages[0].content + '\n\n' %}{% set rest = messages[1:] %}"
        "{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
        "{% for m in rest %}<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ first if loop.first else '' }}{{ m.content | trim }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
    ),
    "mistral": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
        " {{ m.content }}<eos>{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
    ),
    "headerless": "{% for m in messages %}{{ m.content }}{% endfor %}",
    # The end token belongs to the separator; only the last message has one of its own.
    "joined": (
        "{% for m in messages %}{% if not loop.first %}<|im_end|>\n{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}<|im_end|>\n"
    ),
    "end-at-last": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}\n{% endfor %}<eos>"
    ),
    "indexed": (
        "{% for i in range(messages|length) %}<|im_start|>{{ messages[i].role }}\n"
        "{% if i == messages|length - 1 %}<think></think>{% endif %}"
        "{{ messages[i].content }}<|im_end|>\n{% endfor %}"
    ),
    "last-apart": (
        "{% set head = messages[:-1] %}{% for m in head %}<|im_start|>{{ m.role }}\n"
        "{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
        "<|im_start|>{{ messages[-1].role }}\n<think>{{ messages[-1].content }}<|im_end|>\n"
    ),
    "macro": (
        "{% macro all(list) %}{% for m in list %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "<|im_end|>\n{% endfor %}{% endmacro %}{{ all(messages) }}"
    ),
    "macro-rewriting": (
        "{% macro all(list) %}{% for m in list %}<|im_start|>{{ m.role }}\n"
        "{% if loop.last %}<think></think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% endmacro %}{{ all(messages) }}"
    ),
    "macro-tag": (
        "{% macro answer(m) %}<|im_start|>assistant\n{% generation %}{{ m.content }}<|im_end|>"
        "{% endgeneration %}\n{% endmacro %}{% for m in messages %}{% if m.role == 'assistant' %}"
        "{{ answer(m) }}{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% endif %}{% endfor %}"
    ),
    # A macro goes through the other messages to print something of one.
    "macro-lookup": (
        "{% macro name_of(id) %}{% for o in messages %}{% for c in o.tool_calls or [] %}"
        "{% if c.id == id %}{{ c.function.name }}{% endif %}{% endfor %}{% endfor %}{% endmacro %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.tool_calls or [] %}"
        "{{ c.function.arguments | tojson }}{% endfor %}"
        "{% if m.role == 'tool' %}{{ name_of(m.tool_call_id) }}: {% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}"
    ),
    "captured-rewriting": (
        "{% set body %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if loop.last %}<think></think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% endset %}<bos>{{ body }}"
    ),
    "trimmed": (
        "{% set body %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "<|im_end|>\n{% endfor %}{% endset %}{{ body | trim }}"
    ),
    "gathered-rewriting": (
        "{% set ns = namespace(out='') %}{% for m in messages %}"
        "{% set ns.out = ns.out ~ '<|im_start|>' ~ m.role ~ '\n' %}"
        "{% if loop.last %}{% set ns.out = ns.out ~ '<think></think>' %}{% endif %}"
        "{% set ns.out = ns.out ~ m.content ~ '<|im_end|>\n' %}{% endfor %}<bos>{{ ns.out }}"
    ),
    # Nothing says where a message went, and no beginning of a conversation prints what the whole
    # one does.
    "untraceable": (
        "{% set ns = namespace(out='') %}{% for m in messages %}"
        "{% set ns.out = m.content ~ loop.revindex ~ ns.out | trim %}{% endfor %}"
        "{{ ns.out | upper }}"
    ),
    "parts": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for p in m.content %}"
        "{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
        + _PROMPT
    ),
}
