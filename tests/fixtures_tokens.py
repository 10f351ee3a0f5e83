"""Small tokenizers and the chat template of the known-fault tests. No download.

TOK    byte-level: ids 0-255 are bytes; 256 BOS, 257 EOS, 258 PAD, 259 SYS, 260 USER,
       261 ASST, 262 END, 263 THINK, 264 /THINK
TOK-M  TOK with merged pairs 300 `=.`, 301 `: `, 302 two line feeds
TPL    BOS (ROLE content END)*, and ASST as generation prompt
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD, SYS, USER, ASST, END, THINK, END_THINK = range(256, 265)
SPECIAL_TOKENS = {
    "<bos>": BOS,
    "<eos>": EOS,
    "<pad>": PAD,
    "<sys>": SYS,
    "<user>": USER,
    "<asst>": ASST,
    "<end>": END,
    "<think>": THINK,
    "</think>": END_THINK,
}
NOT_SPECIAL = ("<think>", "</think>")  # added tokens that are not flagged special
MERGED = {300: "=.", 301: ": ", 302: "\n\n"}

TPL = (
    "{{ bos_token }}"
    "{% for m in messages %}"
    "{{ {'system': '<sys>', 'user': '<user>', 'assistant': '<asst>'}[m['role']] }}"
    "{{ m['content'] }}<end>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<asst>{% endif %}"
)


def byte_letters() -> list[str]:
    """The printable letter that byte-level tokenizers write for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]


def token_fixture(
    *,
    merges: bool = False,
    pad_is_eos: bool = False,
    adds_bos: bool = False,
    adds_eos: bool = False,
    extra: tuple[str, ...] = (),
    bos: bool = True,
    template: str | None = TPL,
) -> PreTrainedTokenizerFast:
    """TOK (or TOK-M with `merges`) as a transformers tokenizer.

    `adds_bos`, `adds_eos`: its post-processor puts them around every text.
    `extra`: more special tokens, ids from 310 on.
    """
    letters = byte_letters()
    vocabulary = {letter: byte for byte, letter in enumerate(letters)}
    vocabulary |= SPECIAL_TOKENS
    merge_list: list[tuple[str, str]] = []
    merged = {number: "".join(letters[b] for b in text.encode()) for number, text in MERGED.items()}
    if merges:
        vocabulary |= {text: number for number, text in merged.items()}
        merge_list = [(text[0], text[1]) for text in merged.values()]
    vocabulary |= {name: 310 + index for index, name in enumerate(extra)}
    used = set(vocabulary.values())
    vocabulary |= {f"\ue000{n}": n for n in range(max(used)) if n not in used}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merge_list))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    for name in [*SPECIAL_TOKENS, *extra]:
        backend.add_tokens([AddedToken(name, special=name not in NOT_SPECIAL, normalized=False)])
    if adds_bos or adds_eos:
        single = ("<bos> " if adds_bos else "") + "$A" + (" <eos>" if adds_eos else "")
        backend.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
        )
    named: dict[str, Any] = {"eos_token": "<eos>", "pad_token": "<pad>"}
    if bos:
        named["bos_token"] = "<bos>"
    if pad_is_eos:
        named["pad_token"] = "<eos>"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **named)
    tokenizer.chat_template = template
    return tokenizer


def tok(**options: Any) -> PreTrainedTokenizerFast:
    return token_fixture(**options)


def tok_m(**options: Any) -> PreTrainedTokenizerFast:
    return token_fixture(merges=True, **options)


def text_bytes(text: str) -> list[int]:
    """The ids that TOK gives to plain text."""
    return list(text.encode())
