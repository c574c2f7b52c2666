"""What NVIDIA's NeMo AutoModel computes for the golden V4.1 model: another reading of it, whole texts only.

Run as a process of its own, since the package changes others where it is imported:
`python -m tests.support.theirs_v4_1 scores.pt` writes float32 [tokens, vocab] of the golden tokens, with caches
rounded and plain.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from tests.support.tiny_v4 import (
    COMPRESSED_IDS,
    golden_tokens,
    tiny_compressed_ids,
    v4_1_config,
    weights_of,
)

ROOT = Path(__file__).resolve().parents[2]


def their_v4_1_scores(folder: Path) -> dict[str, Tensor]:
    """Scores of the golden tokens, `rounded` and `plain`; the folder keeps them on the way."""
    place = folder / "scores.pt"
    command = [sys.executable, "-m", "tests.support.theirs_v4_1", str(place)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return torch.load(place)


def _main(place: str) -> None:
    from nemo_automodel.components.models.common import BackendConfig
    from nemo_automodel.components.models.deepseek_v41 import attention, engram
    from nemo_automodel.components.models.deepseek_v41.config import (
        DeepseekV41Config,
    )
    from nemo_automodel.components.models.deepseek_v41.model import (
        DeepseekV41ForCausalLM,
    )
    from nemo_automodel.components.models.deepseek_v41.state_dict_adapter import (
        DeepseekV41StateDictAdapter,
    )

    # Golden tokens have no tokenizer: their compressed ids are given instead of derived.
    engram._compressed_token_map = lambda _: (tuple(tiny_compressed_ids()), COMPRESSED_IDS)
    ours = v4_1_config(dtype="float32", dspark_noise_token_id=1000)
    config = DeepseekV41Config(
        text_config=cast("dict[str, Any]", ours["text_config"]), dtype="float32"
    )
    config.vision_config.num_hidden_layers = 0
    backend = BackendConfig(
        attn="eager", linear="torch", rms_norm="torch_fp32", experts="torch", dispatcher="torch"
    )
    model = DeepseekV41ForCausalLM(config, backend=backend, tokenizer=cast("Any", object())).eval()
    adapter = DeepseekV41StateDictAdapter(config, model.moe_config, backend, dtype=torch.float32)
    given = adapter.from_hf({name: tensor.clone() for name, tensor in weights_of(ours).items()})
    missing, unknown = model.load_state_dict(given, strict=False)
    assert not unknown, unknown
    assert all(name.endswith("gate.bias_vl") for name in missing), missing
    tokens, scores = torch.tensor([golden_tokens()]), {}
    with torch.inference_mode():
        scores["rounded"] = model(tokens).logits[0]
        attention.quantize_cache = lambda values, **_: values
        scores["plain"] = model(tokens).logits[0]
    torch.save(scores, place)


if __name__ == "__main__":
    _main(*sys.argv[1:])
