"""Small tokenizers, chat templates and conversations that several tests share."""

import json
from pathlib import Path

import tokenizers

CONTROLS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|end|>", "<|assistant|>")
# Written as those of known models are: a header before each turn, a control token behind it.
CHATML = """\
{% for m in messages %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
TAGGED = """\
{% for m in messages -%}
  {{ '<|im_start|>' + m.role + '\n' }}
  {%- if m.role == 'assistant' %}
    {%- generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}
  {%- else %}{{ m.content + '<|im_end|>' }}{% endif %}
  {{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
# Ends every answer with eos, has no prompt of its own, and trims what it is given.
INST = """\
{{ bos_token }}{% for m in messages %}
{%- if m.role == 'user' %}{{ '[INST] ' + m.content.strip() + ' [/INST]' }}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content.strip() + ' ' + eos_token }}
{%- else %}{{ raise_exception('Only user and assistant: ' + m.role) }}{% endif %}
{%- endfor %}"""
# Closes each conversation with a further token, behind the one that ends the turn.
CLOSED = """\
{% for m in messages %}
{{- '<|assistant|>\n' if m.role == 'assistant' else 'user\n' }}{{ m.content + '<|end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"""
# Leaves out the reasoning of all answers but the last.
THINKING = """\
{% set ns = namespace(last=-2) %}
{% for m in messages if m.role == 'user' %}{% set ns.last = ns.last + 2 %}{% endfor %}
{% for m in messages %}
{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' and loop.index0 > ns.last %}
{{- '<think>' + (m.reasoning_content or '') + '</think>' }}
{%- endif %}
{{- m.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
# What else templates use of their surroundings.
FEATURES = """\
{%- set names = dict(user='U', assistant='A') -%}
{{ strftime_now('%Y') | length }}{{ tools | tojson }}{{ tools | tojson(indent=2) }}
{% for m in messages %}
    {%- if m.role == 'system' %}{% continue %}{% endif %}
    {%- if loop.index0 > 4 %}{% break %}{% endif %}
    {{- names[m.role] }}{{ m.thinking }}{{ m.reasoning_content }}{{ pad_token }}{{ m.content }}
    {%- if m.tool_calls is defined %}{{ m.tool_calls[0].function | tojson }}{% endif %}
{% endfor %}"""
TEMPLATES = {"chatml": CHATML, "tagged": TAGGED, "inst": INST, "closed": CLOSED}
TEMPLATES |= {"thinking": THINKING, "features": FEATURES}
# For bytes, which have one control token.
BYTES = """\
{% for m in messages %}{{ m.role[0] + ':' + m.content }}
{%- if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ 'a:' }}{% endif %}"""

ONE = [
    {"role": "user", "content": "What is a mesh?"},
    {"role": "assistant", "content": "A  mesh\n\nof caf\u00e9s \u2603. "},
]
SEVERAL = [
    {"role": "user", "content": "Hi <there>"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": " and \n"},
    {"role": "assistant", "content": ""},
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": "The end", "reasoning": "be\ncause"},
]
CONVERSATIONS = {"one": ONE, "several": SEVERAL}


def byte_level():
    """A byte-level BPE tokenizer that joins a few pairs, and trims spaces from offsets."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = [("\u0120", "a"), ("l", "l"), ("e", "n"), ("\u010a", "\u010a"), ("\u0120", "\u0120")]
    words = [*alphabet, *("".join(pair) for pair in merges)]
    vocabulary = {word: number for number, word in enumerate(words)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    return _with_controls(made)


def sentence_piece():
    """A tokenizer of words with marked spaces and bytes for the rest, as Llama 2 has."""
    letters = [*map(chr, range(33, 127)), "\u2581"]
    merges = [("\u2581", "a"), ("l", "l"), ("\u2581", "\u2581")]
    words = ["<unk>", *(f"<0x{number:02X}>" for number in range(256)), *letters]
    words += ["".join(pair) for pair in merges]
    vocabulary = {word: number for number, word in enumerate(words)}
    model = tokenizers.models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>")
    model.byte_fallback = True
    made = tokenizers.Tokenizer(model)
    replace = tokenizers.normalizers.Replace(" ", "\u2581")
    made.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("\u2581"), replace]
    )
    parts = tokenizers.decoders
    made.decoder = parts.Sequence(
        [parts.Replace("\u2581", " "), parts.ByteFallback(), parts.Fuse(), parts.Strip(" ", 1, 0)]
    )
    return _with_controls(made)


def _with_controls(made):
    # Some models' control tokens take in the white space behind them.
    taking = ("<|end|>", "<|assistant|>")
    made.add_special_tokens(
        [
            tokenizers.AddedToken(name, special=True, normalized=False, rstrip=name in taking)
            for name in CONTROLS
        ]
    )
    made.add_tokens(["<think>", "</think>"])
    return made


TOKENIZERS = {"byte_level": byte_level, "sentence_piece": sentence_piece}
CONFIG = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "add_bos": True}


def write_model(folder: Path, tokenizer: str = "byte_level", template: str | None = None) -> Path:
    """Writes a tokenizer as a model's folder has it. Returns the path of tokenizer.json."""
    folder.mkdir(parents=True, exist_ok=True)
    TOKENIZERS[tokenizer]().save(str(folder / "tokenizer.json"))
    config = CONFIG if template is None else CONFIG | {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder / "tokenizer.json"
