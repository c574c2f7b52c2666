"""Which blocks are free, held or reusable: block ids and reference counts of one cache group.

Block 0 is the null block: padding and dummy steps name it, no request ever holds it. A block nobody holds
may still carry a reusable prefix; such blocks are given away last, the one untouched longest first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

NULL_BLOCK = 0


class BlockPool:
    """The blocks of one group. Counts are conserved: free + held + null = total."""

    def __init__(self, total_blocks: int) -> None:
        assert total_blocks >= 2, f"a pool of {total_blocks} blocks has none beside the null block"
        self.total_blocks = total_blocks
        self._holders = [0] * total_blocks
        self._keys: list[bytes | None] = [None] * total_blocks
        self._block_of_key: dict[bytes, int] = {}
        self._blank = list(range(total_blocks - 1, NULL_BLOCK, -1))
        self._reusable: OrderedDict[int, None] = OrderedDict()

    @property
    def free_blocks(self) -> int:
        """Blocks that can be taken now, reusable ones included."""
        return len(self._blank) + len(self._reusable)

    @property
    def usable_blocks(self) -> int:
        """Blocks requests can ever hold at once."""
        return self.total_blocks - 1

    def take(self, count: int) -> list[int]:
        """Hold `count` blocks of unspecified content; reusable prefixes are forgotten if need be."""
        assert count <= self.free_blocks, f"took {count} of {self.free_blocks} free blocks"
        return [self._take_one() for _ in range(count)]

    def _take_one(self) -> int:
        if self._blank:
            block_id = self._blank.pop()
        else:
            block_id, _ = self._reusable.popitem(last=False)
            self._forget(block_id)
        self._holders[block_id] = 1
        return block_id

    def hold(self, block_ids: Iterable[int]) -> None:
        """Hold blocks found through `find`, together with whoever holds them already."""
        for block_id in block_ids:
            if self._holders[block_id] == 0:
                del self._reusable[block_id]
            self._holders[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Let go of blocks. Pass them last to first, so that a prefix outlives what follows it."""
        for block_id in block_ids:
            assert self._holders[block_id] > 0, f"released block {block_id} that nobody holds"
            self._holders[block_id] -= 1
            if self._holders[block_id] == 0:
                if self._keys[block_id] is None:
                    self._blank.append(block_id)
                else:
                    self._reusable[block_id] = None

    def publish(self, block_id: int, key: bytes) -> None:
        """Make a held, full block findable. The first block published under a key keeps it."""
        assert self._holders[block_id] > 0, f"published block {block_id} that nobody holds"
        if key not in self._block_of_key and self._keys[block_id] is None:
            self._block_of_key[key] = block_id
            self._keys[block_id] = key

    def find(self, key: bytes) -> int | None:
        """The block published under a key, held or not."""
        return self._block_of_key.get(key)

    def is_unheld(self, block_id: int) -> bool:
        """Whether holding this block would lower the free count."""
        return self._holders[block_id] == 0

    def forget_reusable(self) -> None:
        """Forget every prefix that no request holds."""
        for block_id in self._reusable:
            self._forget(block_id)
            self._blank.append(block_id)
        self._reusable.clear()

    def _forget(self, block_id: int) -> None:
        key = self._keys[block_id]
        assert key is not None, f"block {block_id} is reusable without a key"
        del self._block_of_key[key]
        self._keys[block_id] = None
