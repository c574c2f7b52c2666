"""Small tokenizers of the two kinds that matter for incremental text, with tokens that split characters."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from tokamak.checkpoint.gguf_vocabulary import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    Vocabulary,
    sentencepiece_bpe,
)
from tokamak.text.tokenizer import Tokenizer, byte_alphabet

SPLIT_CHARACTERS = "ďábel 你好 👩‍🚀 𝄞 ﷽"
"""Characters of two, three and four bytes, one of them made of several, from OPEN-03."""


def byte_level_tokenizer() -> Tokenizer:
    """All bytes, three special tokens, and merges within and across characters."""
    alphabet = byte_alphabet()
    ids = {"<|end|>": 0, "<|start|>": 1, "<|turn|>": 2}
    for character in alphabet:
        ids[character] = len(ids)
    spelled = "".join(alphabet[byte] for byte in SPLIT_CHARACTERS.encode())
    merges: list[tuple[str, str]] = []
    for at in range(0, len(spelled) - 1, 3):
        merged = spelled[at : at + 2]
        if merged not in ids:
            merges.append((merged[0], merged[1]))
            ids[merged] = len(ids)
    backend = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    names = ("<|end|>", "<|start|>", "<|turn|>")
    backend.add_special_tokens([AddedToken(name, special=True) for name in names])
    return Tokenizer(backend, bos_id=1, eos_ids=[0])


def word_mark_tokenizer(*, marks_start: bool = True) -> Tokenizer:
    """A SentencePiece kind of vocabulary: word marks, byte pieces, `<s>` put before a text."""
    letters = "abcdefghijklmnopqrstuvwxyzěďáHTW.,!▁"
    words = ["▁t", "▁th", "▁the", "▁w", "or", "▁wor", "ld", "▁world", "▁H", "el", "lo", "▁▁"]
    pieces = [
        *((word, -float(at)) for at, word in enumerate(words)),
        *((c, -99.0) for c in letters),
    ]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256))]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256]
    scores = [0.0] * len(tokens)
    for token, score in pieces:
        tokens.append(token)
        types.append(NORMAL)
        scores.append(score)
    vocabulary = Vocabulary(tokens, types, bos_id=1, eos_ids=frozenset({2}), before=(1,))
    return sentencepiece_bpe(vocabulary, scores, marks_start=marks_start)
