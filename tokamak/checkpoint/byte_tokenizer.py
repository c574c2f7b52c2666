"""A tokenizer for models that have none: one token per byte.

Random weights are made from a config alone, and benchmarks and tests still send text to them.
"""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from tokamak.errors import ModelNotFoundError
from tokamak.text.tokenizer import Tokenizer, byte_alphabet

END_TEXT = "<|end|>"

BYTES = 256


def byte_tokenizer(vocab_tokens: int) -> Tokenizer:
    """Ids 0 to 255 are bytes, 256 ends a text, the others are named after their number.

    Raises:
        ModelNotFoundError: the vocabulary is too small for all bytes.
    """
    if vocab_tokens <= BYTES:
        raise ModelNotFoundError(
            f"the model has no tokenizer, and its vocabulary of {vocab_tokens} is too small for the "
            f"{BYTES + 1} tokens of a byte tokenizer"
        )
    names = [f"[{token_id}]" for token_id in range(BYTES + 1, vocab_tokens)]
    ids = {text: i for i, text in enumerate([*byte_alphabet(), END_TEXT, *names])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END_TEXT, special=True, normalized=False)])
    return Tokenizer(backend, bos_id=None, eos_ids=[BYTES], vocab_tokens=vocab_tokens)
