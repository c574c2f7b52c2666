"""Which tokens to guess ahead of the model. Speculation off is a drafter that proposes nothing."""

from __future__ import annotations

from torch import Tensor


class NoDrafter:
    """Speculation off: an empty proposal, so the step reads the same either way."""

    def propose(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """Propose nothing: int32 [sampled, 0]."""
        del hidden
        return token_ids.new_empty((token_ids.shape[0], 0))
