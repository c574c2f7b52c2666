"""Which blocks each request holds, in every group.

In: requests that are admitted, grow, become reusable and end. Out: block grants for the step plan.
Prefix reuse asks every group and takes the shortest answer: a prefix counts as found where every kind of state that the
next token reads is there. Of a group that keeps the newest tokens alone those are its last blocks; a request lets go
of the others as soon as they are written and no later token reads them. Integers only.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from tokamak.cache.blocks import NULL_BLOCK, BlockPool
from tokamak.cache.groups import CacheGroup, first_late, grows_by_chunk
from tokamak.cache.prefix import KeyChain
from tokamak.core.plan import BlockGrant
from tokamak.core.request import Request


@dataclass(slots=True)
class _Holding:
    """What one request holds: its blocks by group, its key chain, and how much of it is published."""

    chain: KeyChain
    blocks: list[list[int]] = field(default_factory=list)
    """By group; the null block where none is held any more, or none was found."""
    first_held: list[int] = field(default_factory=list)
    """By group: how many null blocks there are in front."""
    published_blocks: int = 0
    first_right: list[int] = field(default_factory=list)
    """By group: the first position from which all rows are what an uncut prompt's would be."""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """A reusable prefix found for a request: tokens, and their blocks by group."""

    cached_tokens: int
    blocks: tuple[tuple[int, ...], ...]
    """The null block stands where a group's rows are out of every later token's sight."""


class Holdings:
    """The host's account of all cache blocks."""

    def __init__(
        self, groups: Sequence[CacheGroup], *, block_tokens: int, blocks: Sequence[int], reuse: bool
    ) -> None:
        """Begin with nothing held. blocks: of each group, the null block included."""
        self.block_tokens = block_tokens
        self.pools = tuple(BlockPool(count) for count in blocks)
        self._by_chunk = grows_by_chunk(groups)
        self._sizing = tuple(
            pool for pool, later in zip(self.pools, self._by_chunk, strict=True) if not later
        )
        self._keep_tokens = tuple(group.keep_tokens for group in groups)
        self._is_late = tuple(group.late_tokens > 0 for group in groups)
        self._bounded = any(group.bounded for group in groups)
        self._late_tokens = max(group.late_tokens for group in groups)
        assert all(group.late_tokens in (0, self._late_tokens) for group in groups), "two tails"
        self._reuse = reuse
        self._held: dict[str, _Holding] = {}

    @property
    def free_blocks(self) -> int:
        """Blocks that every group which is asked for whole prompts can still give."""
        return min(pool.free_blocks for pool in self._sizing)

    @property
    def usable_blocks(self) -> int:
        """Blocks one request could hold if it were alone."""
        return min(pool.usable_blocks for pool in self._sizing)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that cover so many tokens."""
        return -(-tokens // self.block_tokens)

    def match(self, request: Request) -> PrefixMatch:
        """The longest reusable prefix of a waiting request. One token is always left to compute."""
        limit = (request.known_tokens - 1) // self.block_tokens
        if not self._reuse or request.params.prompt_logprobs is not None:
            limit = 0
        late = self.first_late(request)
        if self._bounded and late:
            # Late rows of its own begin there, and those of others are other numbers.
            limit = min(limit, late // self.block_tokens)
        if limit == 0:
            return PrefixMatch(0, tuple(() for _ in self.pools))
        keys = self._chain(request).keys[:limit]
        unread = self._unread(request)
        groups = tuple(zip(self.pools, self._keep_tokens, unread, strict=True))
        blocks = min([limit, *(_run(pool, keys) for pool, keep, _ in groups if not keep)])
        kept = [group for group in groups if group[1]]
        while not all(
            blocks <= free or self._has_newest(pool, keys[:blocks], keep)
            for pool, keep, free in kept
        ):
            blocks -= 1
        found: list[tuple[int, ...]] = []
        for pool, keep, free in groups:
            first = self._first_read(blocks * self.block_tokens, keep) if blocks > free else blocks
            ids = [pool.find(key) for key in keys[first:blocks]]
            found.append((*[NULL_BLOCK] * first, *(block for block in ids if block is not None)))
        return PrefixMatch(blocks * self.block_tokens, tuple(found))

    def first_late(self, request: Request) -> int:
        """The first position late layers run for in a prefill of all known tokens; 0 where they run for all."""
        if request.params.prompt_logprobs is not None:
            return 0
        return first_late(request.known_tokens, self._late_tokens)

    def _unread(self, request: Request) -> list[int]:
        """By group: how long a prefix is, in blocks, of which this request reads no row there.

        Late layers begin behind it, with rows enough to need none before them.
        """
        unread = self.first_late(request) // self.block_tokens
        return [unread if is_late else 0 for is_late in self._is_late]

    def _first_read(self, position: int, keep_tokens: int) -> int:
        """The first block that a token at a position, or a later one, reads."""
        if not keep_tokens:
            return 0
        return max(0, position - keep_tokens + 1) // self.block_tokens

    def _has_newest(self, pool: BlockPool, keys: Sequence[bytes], keep_tokens: int) -> bool:
        """Whether a group has what the token behind some blocks reads."""
        first = self._first_read(len(keys) * self.block_tokens, keep_tokens)
        return all(pool.find(key) is not None for key in reversed(keys[first:]))

    def _chain(self, request: Request) -> KeyChain:
        """The key chain of a request, kept while it waits so that each block is hashed once."""
        holding = self._held.get(request.request_id)
        if holding is None:
            holding = _Holding(KeyChain(request.cache_salt, self.block_tokens))
            self._held[request.request_id] = holding
        holding.chain.extend(request.known_tokens, request.token_ids)
        return holding.chain

    def blocks_to_admit(self, match: PrefixMatch, tokens: int) -> int:
        """How much the free count falls if a request with this match is admitted for `tokens`."""
        fresh = self.blocks_for(tokens) - match.cached_tokens // self.block_tokens
        revived = [
            sum(block_id != NULL_BLOCK and pool.is_unheld(block_id) for block_id in ids)
            for pool, ids, later in zip(self.pools, match.blocks, self._by_chunk, strict=True)
            if not later
        ]
        return fresh + max(revived)

    def admit(self, request: Request, match: PrefixMatch, tokens: int) -> list[BlockGrant]:
        """Hold the matched blocks and fresh ones up to `tokens`; some groups' come with `reach`."""
        self._chain(request)
        holding = self._held[request.request_id]
        assert not holding.blocks, f"request {request.request_id} is admitted twice"
        late = self.first_late(request)
        # A cut prompt's first late rows see too little; the newest `keep_tokens` are right in all layers, or none is.
        cut = late > 0 and match.cached_tokens <= late
        for pool, ids, is_late, keep in zip(
            self.pools, match.blocks, self._is_late, self._keep_tokens, strict=True
        ):
            first = ids.count(NULL_BLOCK)
            pool.hold(ids[first:])
            holding.blocks.append(list(ids))
            holding.first_held.append(first)
            right = sys.maxsize if self._bounded else request.known_tokens - keep
            holding.first_right.append(right if is_late and cut else 0)
        self._published(request, holding, match.cached_tokens // self.block_tokens)
        cached = match.cached_tokens
        grants = self._grow(request, [cached if later else tokens for later in self._by_chunk])
        assert grants is not None, "admitted a request that does not fit"
        if match.cached_tokens == 0:
            return grants
        shared = [
            BlockGrant(slot=request.slot, group=group, start=first, block_ids=ids[first:])
            for group, (ids, first) in enumerate(zip(match.blocks, holding.first_held, strict=True))
        ]
        return shared + grants

    def grow(self, request: Request, tokens: int) -> list[BlockGrant] | None:
        """Hold enough blocks for `tokens`; None, with nothing changed, when they are not free."""
        return self._grow(request, [tokens] * len(self.pools))

    def reach(self, request: Request, tokens: int) -> list[BlockGrant]:
        """Hold blocks for a chunk that ends at `tokens`, in groups that do not take a whole prompt's at once.

        They are there: such a group has blocks for all requests that may run (`groups.window_blocks`).
        """
        if not any(self._by_chunk):
            return []
        grants = self._grow(request, [tokens if later else 0 for later in self._by_chunk])
        assert grants is not None, f"no blocks for a chunk of request {request.request_id}"
        return grants

    def _grow(self, request: Request, tokens: Sequence[int]) -> list[BlockGrant] | None:
        """Hold enough blocks for so many tokens of each group; None when they are not free."""
        holding = self._held[request.request_id]
        missing = [
            max(0, self.blocks_for(wanted) - len(ids))
            for wanted, ids in zip(tokens, holding.blocks, strict=True)
        ]
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

        Then let go of those no later token reads. Has nothing to do before `request.publish_tokens` are written.
        """
        holding = self._held[request.request_id]
        tokens = min(written_tokens, request.known_tokens)
        full = tokens // self.block_tokens
        if full <= holding.published_blocks:
            return
        if self._reuse:
            holding.chain.extend(tokens, request.token_ids)
            for block in range(holding.published_blocks, full):
                for pool, ids, right in zip(
                    self.pools, holding.blocks, holding.first_right, strict=True
                ):
                    if block * self.block_tokens >= right:
                        pool.publish(ids[block], holding.chain.keys[block])
        self._published(request, holding, full)
        self._let_go(holding, tokens)

    def _let_go(self, holding: _Holding, position: int) -> None:
        """Give back blocks that neither a token at `position` nor a later one reads."""
        for group, (pool, keep) in enumerate(zip(self.pools, self._keep_tokens, strict=True)):
            ids, first = holding.blocks[group], holding.first_held[group]
            end = min(self._first_read(position, keep), len(ids))
            if end > first:
                pool.release(reversed(ids[first:end]))
                ids[first:end] = [NULL_BLOCK] * (end - first)
                holding.first_held[group] = end

    def _published(self, request: Request, holding: _Holding, blocks: int) -> None:
        holding.published_blocks = blocks
        if self._reuse or any(self._keep_tokens):
            request.publish_tokens = (blocks + 1) * self.block_tokens

    def release(self, request: Request) -> None:
        """Let go of everything a request holds; does nothing for one that holds nothing."""
        request.room_tokens, request.publish_tokens = 0, sys.maxsize
        holding = self._held.pop(request.request_id, None)
        if holding is not None:
            for pool, ids, first in zip(
                self.pools, holding.blocks, holding.first_held, strict=False
            ):
                pool.release(reversed(ids[first:]))

    def forget_prefixes(self) -> None:
        """Forget every prefix that no request holds."""
        for pool in self.pools:
            pool.forget_reusable()


def _run(pool: BlockPool, keys: Sequence[bytes]) -> int:
    """How many of the first keys a pool has without a gap."""
    found = 0
    for key in keys:
        if pool.find(key) is None:
            break
        found += 1
    return found
