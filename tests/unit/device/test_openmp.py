"""Do worker threads sleep while they wait, unless the user decided otherwise?"""

from __future__ import annotations

import subprocess
import sys

from tokamak.device.openmp import WAIT_POLICY, let_threads_sleep


def test_a_users_own_policy_is_kept():
    environment = {WAIT_POLICY: "active"}

    let_threads_sleep(environment)

    assert environment == {WAIT_POLICY: "active"}


def test_the_policy_is_set_before_torch_is_imported():
    code = (
        "import os, sys, tokamak\n"
        "assert 'torch' not in sys.modules\n"
        "tokamak.LLM\n"
        "assert 'torch' in sys.modules\n"
        f"print(os.environ[{WAIT_POLICY!r}])"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "passive"
