"""How the vocabulary inside a GGUF file becomes a tokenizer.

Two kinds are known: byte-level BPE (`gpt2`), split into words as the file's pre-tokenizer says, and
SentencePiece BPE (`llama`), whose merges follow from the scores of its pieces.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from tokamak.checkpoint.gguf import GgufFile
from tokamak.errors import CheckpointError, UnsupportedModelError
from tokamak.text.tokenizer import WORD_MARK, Tokenizer

log = logging.getLogger(__name__)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of tokens, as GGUF numbers them."""

END_TEXTS = frozenset(
    {
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<end_of_turn>",
        "</s>",
    }
)
"""Special tokens that end a text or a turn in every vocabulary that has them."""

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"

WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"

REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

CASED_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
)


@dataclass(frozen=True, slots=True)
class Splitting:
    """How text is cut into words before merging."""

    pattern: str | None = None
    """A regular expression of words; None means GPT-2's."""
    single_digits: bool = False
    """Whether every digit is cut off first."""
    whole_words: bool = False
    """Whether a word that is a token needs no merges."""
    normal_form: bool = False
    """Whether text is brought to Unicode's composed form (NFC) first."""
    adds_bos: bool = False
    """Whether BOS comes first unless the file says otherwise."""


_GPT2 = Splitting()
_SINGLE_DIGITS = Splitting(single_digits=True)
_LLAMA3 = Splitting(
    rf"{CONTRACTIONS}|{WORDS}|\p{{N}}{{1,3}}|{REST}", whole_words=True, adds_bos=True
)
_TEKKEN = Splitting(
    rf"{CASED_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    whole_words=True,
    adds_bos=True,
)

SPLITTINGS: dict[str, Splitting] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": Splitting(rf"{CONTRACTIONS}|{WORDS}|\p{{N}}|{REST}", normal_form=True),
    "tekken": _TEKKEN,
}
"""By tokenizer.ggml.pre."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The lists of a vocabulary, and what it says of its special tokens."""

    tokens: Sequence[str]
    types: Sequence[int]
    bos_id: int | None
    eos_ids: frozenset[int]
    before: tuple[int, ...] = ()
    """Ids put before a text, such as BOS."""
    after: tuple[int, ...] = ()


def read_vocabulary(file: GgufFile) -> Tokenizer:
    """The tokenizer of the model in `file`.

    Raises:
        UnsupportedModelError: a kind of vocabulary or pre-tokenizer that is not known.
        CheckpointError: lists are missing or contradict each other.
    """
    kind = file.get("tokenizer.ggml.model", str)
    if kind == "gpt2":
        return _byte_level(file)
    if kind == "llama":
        vocabulary = _lists(file, adds_bos=True)
        return sentencepiece_bpe(
            vocabulary,
            file.numbers("tokenizer.ggml.scores"),
            marks_start=file.get("tokenizer.ggml.add_space_prefix", bool, True),
        )
    raise UnsupportedModelError(
        f"{file.path} has a vocabulary of kind {kind!r}, which is not supported",
        hint="supported: gpt2 (byte-level BPE) and llama (SentencePiece BPE)",
    )


def _byte_level(file: GgufFile) -> Tokenizer:
    name = file.get("tokenizer.ggml.pre", str)
    if name not in SPLITTINGS and name is not None:
        raise UnsupportedModelError(
            f"tokenizer.ggml.pre of {file.path} is {name!r}, a pre-tokenizer that is not known",
            hint=f"known: {', '.join(SPLITTINGS)}",
        )
    if name in (None, "default"):
        log.warning("%s names no pre-tokenizer; text is split as for GPT-2", file.path)
    splitting = SPLITTINGS[name or "default"]
    vocabulary = _lists(file, adds_bos=splitting.adds_bos)
    merges: list[tuple[str, str]] = []
    for merge in file.strings("tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
    for left, right in merges:
        if left not in ids or right not in ids or left + right not in ids:
            raise CheckpointError(f"a merge of {file.path} names no tokens: {left!r} {right!r}")
    model = models.BPE(vocab=ids, merges=merges, ignore_merges=splitting.whole_words)
    backend = tokenizers.Tokenizer(model)
    if splitting.normal_form:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _word_splitter(splitting)
    backend.decoder = decoders.ByteLevel()
    return _finished(backend, vocabulary)


def _word_splitter(splitting: Splitting) -> Any:
    if splitting.pattern is not None:
        words = pre_tokenizers.Split(Regex(splitting.pattern), behavior="isolated")
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([words, bytes_only])
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if splitting.single_digits:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, byte_level])
    return byte_level


def sentencepiece_bpe(
    vocabulary: Vocabulary, scores: Sequence[float], *, marks_start: bool
) -> Tokenizer:
    """A SentencePiece BPE tokenizer; `marks_start` puts a blank before the first word."""
    if len(scores) != len(vocabulary.tokens):
        raise CheckpointError(
            f"the vocabulary has {len(vocabulary.tokens)} tokens and {len(scores)} scores"
        )
    ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
    unknown = [i for i, kind in enumerate(vocabulary.types) if kind == UNKNOWN]
    model = models.BPE(
        vocab=ids,
        merges=_merges(vocabulary, scores, ids),
        unk_token=vocabulary.tokens[unknown[0]] if unknown else None,
        fuse_unk=True,
        byte_fallback=any(kind == BYTE for kind in vocabulary.types),
    )
    backend = tokenizers.Tokenizer(model)
    blanks = normalizers.Replace(" ", WORD_MARK)
    first = [normalizers.Prepend(WORD_MARK)] if marks_start else []
    backend.normalizer = normalizers.Sequence([*first, blanks])
    strip = [decoders.Strip(" ", 1, 0)] if marks_start else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(WORD_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return _finished(backend, vocabulary)


def _merges(
    vocabulary: Vocabulary, scores: Sequence[float], ids: dict[str, int]
) -> list[tuple[str, str]]:
    """All ways to make a piece of two others, best piece first, as SentencePiece merges them."""
    mergeable = {
        token: token_id
        for token, token_id in ids.items()
        if vocabulary.types[token_id] in (NORMAL, USER_DEFINED, UNUSED)
    }
    found: list[tuple[float, int, int, str, str]] = []
    for token, token_id in mergeable.items():
        for cut in range(1, len(token)):
            left, right = mergeable.get(token[:cut]), mergeable.get(token[cut:])
            if left is not None and right is not None:
                found.append((-scores[token_id], left, right, token[:cut], token[cut:]))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _lists(file: GgufFile, *, adds_bos: bool) -> Vocabulary:
    """The tokens and types of the file, checked; `adds_bos` holds unless the file says otherwise."""
    tokens = file.strings("tokenizer.ggml.tokens")
    types = file.numbers("tokenizer.ggml.token_type")
    if len(types) != len(tokens):
        raise CheckpointError(f"{file.path} has {len(tokens)} tokens and {len(types)} token types")
    first_ids: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        first = first_ids.setdefault(token, token_id)
        if first != token_id:
            raise CheckpointError(
                f"{file.path} has the token {token!r} twice, as {first} and as {token_id}"
            )
    special = {
        name: file.get(f"tokenizer.ggml.{name}_token_id", int)
        for name in ("bos", "eos", "eot", "eom")
    }
    for name, token_id in special.items():
        if token_id is not None and not 0 <= token_id < len(tokens):
            raise CheckpointError(
                f"tokenizer.ggml.{name}_token_id of {file.path} is {token_id}; the vocabulary is 0 to "
                f"{len(tokens) - 1}"
            )
    named_ends = {special[name] for name in ("eos", "eot", "eom")} - {None}
    known_ends = {i for i, t in enumerate(tokens) if types[i] == CONTROL and t in END_TEXTS}
    return Vocabulary(
        tokens=tokens,
        types=types,
        bos_id=special["bos"],
        eos_ids=frozenset(i for i in named_ends | known_ends if i is not None),
        before=_if(file.get("tokenizer.ggml.add_bos_token", bool, adds_bos), special["bos"]),
        after=_if(file.get("tokenizer.ggml.add_eos_token", bool, False), special["eos"]),
    )


def _finished(backend: tokenizers.Tokenizer, vocabulary: Vocabulary) -> Tokenizer:
    """Add special tokens, and the rule that puts BOS and EOS around a text."""
    tokens, types = vocabulary.tokens, vocabulary.types
    for kinds, special in (((CONTROL, UNKNOWN), True), ((USER_DEFINED,), False)):
        backend.add_tokens(
            [
                AddedToken(token, special=special, normalized=False)
                for token, kind in zip(tokens, types, strict=True)
                if kind in kinds and token
            ]
        )
    before, after = vocabulary.before, vocabulary.after
    if before or after:
        backend.post_processor = processors.TemplateProcessing(
            single=[*(tokens[i] for i in before), "$A", *(tokens[i] for i in after)],
            special_tokens=[(tokens[i], i) for i in {*before, *after}],
        )
    return Tokenizer(backend, bos_id=vocabulary.bos_id, eos_ids=vocabulary.eos_ids)


def _if(wanted: bool, token_id: int | None) -> tuple[int, ...]:
    return (token_id,) if wanted and token_id is not None else ()
