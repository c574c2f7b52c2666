"""How a prefix is named: a chain of hashes, one per full block of tokens.

A block's key covers its tokens, everything before them and the request's salt, so equal keys mean equal
cache rows. 16 bytes of BLAKE2b: two different prefixes meet with probability 2^-64 after 2^32 blocks.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence

KEY_BYTES = 16


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of a block: a hash of its parent's key and its token ids."""
    digest = hashlib.blake2b(parent, digest_size=KEY_BYTES)
    digest.update(array("i", token_ids).tobytes())
    return digest.digest()


def root_key(salt: str) -> bytes:
    """The parent of a first block; requests with different salts share nothing."""
    return hashlib.blake2b(salt.encode(), digest_size=KEY_BYTES, person=b"tokamak-prefix").digest()


class KeyChain:
    """The keys of one request's full blocks, extended as its tokens become known."""

    def __init__(self, salt: str, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._root = root_key(salt)
        self.keys: list[bytes] = []

    def extend(self, known_tokens: int, token_ids: Callable[[int, int], list[int]]) -> None:
        """Add keys of blocks that are full within `known_tokens`; `token_ids(start, stop)` reads ids."""
        for block in range(len(self.keys), known_tokens // self._block_tokens):
            start = block * self._block_tokens
            parent = self.keys[-1] if self.keys else self._root
            self.keys.append(block_key(parent, token_ids(start, start + self._block_tokens)))
