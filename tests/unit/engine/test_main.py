"""Is a kernel's compiling begun before the engine process imports what takes seconds?"""

import subprocess
import sys


def test_an_engine_process_begins_without_pytorch():
    code = "import sys, tokamak.engine.__main__; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=50).returncode == 0
