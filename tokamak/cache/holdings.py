"""Which blocks each request holds, in every group.

In: requests that are admitted, grow, become reusable and end. Out: block grants for the step plan.
Prefix reuse asks every group and takes the shortest answer. Integers only.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from tokamak.cache.blocks import BlockPool
from tokamak.cache.groups import CacheGroup
from tokamak.cache.prefix import KeyChain
from tokamak.core.plan import BlockGrant
from tokamak.core.request import Request


@dataclass(slots=True)
class _Holding:
    """What one request holds: its blocks by group, its key chain, and how much of it is published."""

    chain: KeyChain
    blocks: list[list[int]] = field(default_factory=list)
    published_blocks: int = 0


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """A reusable prefix found for a request: tokens, and their blocks by group."""

    cached_tokens: int
    blocks: tuple[tuple[int, ...], ...]


class Holdings:
    """The host's account of all cache blocks."""

    def __init__(
        self, groups: Sequence[CacheGroup], *, block_tokens: int, total_blocks: int, reuse: bool
    ) -> None:
        self.block_tokens = block_tokens
        self.pools = tuple(BlockPool(total_blocks) for _ in groups)
        self._reuse = reuse
        self._held: dict[str, _Holding] = {}

    @property
    def free_blocks(self) -> int:
        """Blocks every group can still give."""
        return min(pool.free_blocks for pool in self.pools)

    @property
    def usable_blocks(self) -> int:
        """Blocks one request could hold if it were alone."""
        return min(pool.usable_blocks for pool in self.pools)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that cover so many tokens."""
        return -(-tokens // self.block_tokens)

    def match(self, request: Request) -> PrefixMatch:
        """The longest reusable prefix of a waiting request. One token is always left to compute."""
        limit = (request.known_tokens - 1) // self.block_tokens
        if not self._reuse or request.params.prompt_logprobs is not None:
            limit = 0
        if limit == 0:
            return PrefixMatch(0, tuple(() for _ in self.pools))
        chain = self._chain(request)
        found = [self._find(pool, chain.keys[:limit]) for pool in self.pools]
        blocks = min(len(ids) for ids in found)
        return PrefixMatch(blocks * self.block_tokens, tuple(tuple(ids[:blocks]) for ids in found))

    def _chain(self, request: Request) -> KeyChain:
        """The key chain of a request, kept while it waits so that each block is hashed once."""
        holding = self._held.get(request.request_id)
        if holding is None:
            holding = _Holding(KeyChain(request.cache_salt, self.block_tokens))
            self._held[request.request_id] = holding
        holding.chain.extend(request.known_tokens, request.token_ids)
        return holding.chain

    @staticmethod
    def _find(pool: BlockPool, keys: Sequence[bytes]) -> list[int]:
        found: list[int] = []
        for key in keys:
            block_id = pool.find(key)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def blocks_to_admit(self, match: PrefixMatch, tokens: int) -> int:
        """How much the free count falls if a request with this match is admitted for `tokens`."""
        fresh = self.blocks_for(tokens) - match.cached_tokens // self.block_tokens
        revived = [
            sum(pool.is_unheld(block_id) for block_id in ids)
            for pool, ids in zip(self.pools, match.blocks, strict=True)
        ]
        return fresh + max(revived)

    def admit(self, request: Request, match: PrefixMatch, tokens: int) -> list[BlockGrant]:
        """Hold the matched blocks and fresh ones up to `tokens`."""
        self._chain(request)
        holding = self._held[request.request_id]
        assert not holding.blocks, f"request {request.request_id} is admitted twice"
        for pool, ids in zip(self.pools, match.blocks, strict=True):
            pool.hold(ids)
            holding.blocks.append(list(ids))
        self._published(request, holding, match.cached_tokens // self.block_tokens)
        grants = self.grow(request, tokens)
        assert grants is not None, "admitted a request that does not fit"
        if match.cached_tokens == 0:
            return grants
        shared = [
            BlockGrant(slot=request.slot, group=group, start=0, block_ids=ids)
            for group, ids in enumerate(match.blocks)
        ]
        return shared + grants

    def grow(self, request: Request, tokens: int) -> list[BlockGrant] | None:
        """Hold enough blocks for `tokens`; None, with nothing changed, when they are not free."""
        holding = self._held[request.request_id]
        needed = self.blocks_for(tokens)
        missing = [max(0, needed - len(ids)) for ids in holding.blocks]
        if any(m > pool.free_blocks for m, pool in zip(missing, self.pools, strict=True)):
            return None
        grants: list[BlockGrant] = []
        for group, (count, pool) in enumerate(zip(missing, self.pools, strict=True)):
            if count:
                start, fresh = len(holding.blocks[group]), pool.take(count)
                holding.blocks[group].extend(fresh)
                grants.append(
                    BlockGrant(slot=request.slot, group=group, start=start, block_ids=tuple(fresh))
                )
        request.room_tokens = min(map(len, holding.blocks)) * self.block_tokens
        return grants

    def publish(self, request: Request, written_tokens: int) -> None:
        """Make full blocks within `written_tokens` findable; their rows are written and ids known.

        Has nothing to do before `request.publish_tokens` are written.
        """
        if not self._reuse:
            return
        holding = self._held[request.request_id]
        tokens = min(written_tokens, request.known_tokens)
        full = tokens // self.block_tokens
        if full <= holding.published_blocks:
            return
        holding.chain.extend(tokens, request.token_ids)
        for block in range(holding.published_blocks, full):
            for pool, ids in zip(self.pools, holding.blocks, strict=True):
                pool.publish(ids[block], holding.chain.keys[block])
        self._published(request, holding, full)

    def _published(self, request: Request, holding: _Holding, blocks: int) -> None:
        holding.published_blocks = blocks
        if self._reuse:
            request.publish_tokens = (blocks + 1) * self.block_tokens

    def release(self, request: Request) -> None:
        """Let go of everything a request holds; does nothing for one that holds nothing."""
        request.room_tokens, request.publish_tokens = 0, sys.maxsize
        holding = self._held.pop(request.request_id, None)
        if holding is not None:
            for pool, ids in zip(self.pools, holding.blocks, strict=False):
                pool.release(reversed(ids))

    def forget_prefixes(self) -> None:
        """Forget every prefix that no request holds."""
        for pool in self.pools:
            pool.forget_reusable()
