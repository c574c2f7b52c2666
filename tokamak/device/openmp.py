"""How do PyTorch's worker threads wait for each other? Asleep, so that a busy machine stays usable.

By default OpenMP threads spin while they wait. When anything else wants a core (the API process of a server
does, all the time), a spinning thread keeps it from the very thread it waits for, and a few milliseconds of work
take a quarter of a second. The runtime reads the environment once, when torch is imported.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

WAIT_POLICY = "OMP_WAIT_POLICY"


def let_threads_sleep(environment: MutableMapping[str, str] = os.environ) -> None:
    """Ask for sleeping threads, unless the user decided; works before torch is imported."""
    environment.setdefault(WAIT_POLICY, "passive")
