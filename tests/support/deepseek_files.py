"""Checkpoints in the layout of DeepSeek V4 and V4.1: which tensor is stored how, and what the stored numbers are.

Names and formats are those of the releases: FP8 linears with tiles of 128 x 128 (V4) or 32 x 32 (V4.1), experts of two
4-bit numbers a byte, tables of n-grams in FP8 with a scale per 32 numbers, the rest plain.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.tiny import write_json
from tokamak.core.minifloat import UE8M0
from tokamak.quant.weights import fp8_weight, mxfp4_weight

V4, V41 = (128, 128), (32, 32)

FP4 = re.compile(r"ffn\.experts\.\d+\.w[123]\.weight$")
TABLE = re.compile(r"engram\.embed\.weight$")
FP8 = re.compile(
    r"attn\.(wq_a|wq_b|wkv|wo_a|wo_b)\.weight$|indexer\.wq_b\.weight$|shared_experts\.w[123]\.weight$|"
    r"engram\.wkv\.weight$|main_proj\.weight$"
)
FLOAT32 = re.compile(r"hc_\w+$|attn_sink$|gate\.bias(_vl)?$")

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def deepseek_shapes(width: int = 160, inner: int = 96) -> dict[str, tuple[int, ...]]:
    """A tensor of every kind that V4.1's releases hold, in sizes that leave blocks of 128 unfilled."""
    return {
        "embed.weight": (40, width),
        "norm.weight": (width,),
        "layers.1.attn_norm.weight": (width,),
        "layers.1.hc_attn_fn": (24, 4 * width),
        "layers.1.hc_attn_base": (24,),
        "layers.1.hc_attn_scale": (3,),
        "layers.1.attn.attn_sink": (8,),
        "layers.1.attn.wq_a.weight": (inner, width),
        "layers.1.attn.wq_b.weight": (256, inner),
        "layers.1.attn.wkv.weight": (64, width),
        "layers.1.attn.wo_a.weight": (128, 128),
        "layers.1.attn.wo_b.weight": (width, 128),
        "layers.1.attn.compressor.wkv.weight": (64, width),
        "layers.1.attn.indexer.wq_b.weight": (64, inner),
        "layers.1.ffn.gate.weight": (4, width),
        "layers.1.ffn.gate.bias": (4,),
        "layers.1.ffn.experts.0.w1.weight": (inner, width),
        "layers.1.ffn.experts.0.w2.weight": (width, inner),
        "layers.1.ffn.experts.0.w3.weight": (inner, width),
        "layers.1.ffn.shared_experts.w2.weight": (width, inner),
        "layers.1.engram.embed.weight": (300, 256),
        "layers.1.engram.wkv.weight": (5 * width, 192),
        "mtp.0.main_proj.weight": (width, 3 * width),
        "mtp.0.ffn.experts.3.w1.weight": (inner, width),
    }


def deepseek_weights(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    """Seeded float32 numbers whose rows are of different sizes."""
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        rows = torch.exp2(torch.randint(-9, 4, (shape[0],), generator=generator).float())
        numbers = torch.randn(shape, generator=generator)
        weights[name] = numbers * rows.view(-1, *[1] * (len(shape) - 1))
    return weights


def deepseek_config(block: tuple[int, int], **said: object) -> dict[str, object]:
    """A config that says no more than how weights are stored."""
    quantization = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(block), "scale_fmt": "ue8m0",
        "expert_dtype": "fp4", **said,
    }  # fmt: skip
    return {"architectures": ["DeepseekV41ForCausalLM"], "quantization_config": quantization}


def stored_tensors(
    weights: Mapping[str, Tensor], block: tuple[int, int]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of a release's files, and by weight the float32 numbers they stand for."""
    tensors: dict[str, Tensor] = {}
    exact: dict[str, Tensor] = {}
    for name, numbers in weights.items():
        scale = name.removesuffix("weight") + "scale"
        if FP4.search(name):
            packed = mxfp4_weight(numbers)
            tensors |= {name: packed.codes.view(torch.int8), scale: packed.scales}
            exact[name] = _of_packed(packed.codes, packed.scales)
        elif TABLE.search(name) or FP8.search(name):
            tile = (1, 32) if TABLE.search(name) else block
            scaled = fp8_weight(numbers, tile)
            tensors |= {name: scaled.codes, scale: scaled.scales}
            exact[name] = _of_scaled(scaled.codes, scaled.scales, tile)
        else:
            plain = torch.float32 if FLOAT32.search(name) else torch.bfloat16
            tensors[name] = numbers.to(plain)
            exact[name] = tensors[name].float()
    return tensors, exact


def _of_scaled(codes: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """8-bit codes times their scales, number by number."""
    factors = _powers(scales)
    rows, columns = (np.arange(size) // part for size, part in zip(codes.shape, block, strict=True))
    exact = codes.double().numpy() * factors[rows[:, None], columns[None, :]]
    return torch.from_numpy(exact.astype(np.float32))


def _of_packed(codes: Tensor, scales: Tensor) -> Tensor:
    """4-bit codes times their scales, number by number."""
    packed = codes.numpy()
    numbers = np.empty((packed.shape[0], 2 * packed.shape[1]))
    numbers[:, 0::2], numbers[:, 1::2] = E2M1[packed % 16], E2M1[packed // 16]
    exact = numbers * _powers(scales).repeat(32, axis=1)
    return torch.from_numpy(exact.astype(np.float32))


def _powers(scales: Tensor) -> np.ndarray:
    assert scales.dtype == UE8M0
    return 2.0 ** (scales.view(torch.uint8).numpy().astype(np.float64) - 127)


def write_tensors(
    folder: Path, config: Mapping[str, object], tensors: Mapping[str, Tensor], shards: int = 1
) -> Path:
    """A folder with a config and tensors as they are, in `shards` files with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", dict(config))
    places: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        mine = {name: tensors[name] for name in sorted(tensors)[shard::shards]}
        save_file(mine, folder / file, metadata={"format": "pt"})
        places.update(dict.fromkeys(mine, file))
    write_json(folder / "model.safetensors.index.json", {"weight_map": places})
    return folder
