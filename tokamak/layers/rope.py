"""At what angle each position turns: rotary frequencies of every kind we know, as one table.

In: a config's rope fields. Out: cosines and sines for positions 0 to max_model_len - 1, computed in
float64 and stored in float32. A kind of scaling we do not know is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tokamak.errors import CheckpointError, UnsupportedModelError
from tokamak.layers.config_fields import ConfigFields

ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True)
class Rope:
    """How positions become angles."""

    kind: str
    """`default`, `linear`, `dynamic`, `llama3` or `yarn`."""
    theta: float
    rotary_dim: int
    """How many leading numbers of a head are rotated, in pairs half of it apart."""
    trained_tokens: int
    """The context the frequencies were trained at, before any scaling."""
    parameters: tuple[tuple[str, float], ...] = ()
    """What the kind of scaling needs beyond these, by name."""

    def table(self, positions: int, device: torch.device) -> Tensor:
        """Cosines then sines of each position: [positions, rotary_dim] float32.

        Raises:
            UnsupportedModelError: the context would need angles that depend on the request's length.
        """
        frequencies, amplitude = SCALINGS[self.kind](self, positions)
        angles = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies
        both = torch.cat([angles.cos(), angles.sin()], dim=-1) * amplitude
        return both.to(device=device, dtype=torch.float32)


def read_rope(fields: ConfigFields, head_dim: int) -> Rope:
    """The rope of a config: `rope_parameters`, or `rope_theta` and `rope_scaling` of older files.

    Raises:
        UnsupportedModelError: a kind of scaling, or a form of it, that we do not implement.
        CheckpointError: a parameter of that kind is missing or no number.
    """
    theta = fields.number("rope_theta", 10_000.0)
    partial = fields.number("partial_rotary_factor", 1.0)
    trained_tokens = fields.integer("max_position_embeddings")
    original = fields.value(ORIGINAL)
    newer, older = fields.value("rope_parameters"), fields.value("rope_scaling")
    given = newer if newer is not None else older
    if given is None:
        given = {}
    if not isinstance(given, Mapping):
        raise CheckpointError(f"rope_parameters is {given!r}; expected an object")
    rope = {str(name): value for name, value in given.items()}
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise UnsupportedModelError(
            f"{fields.architecture} with rope_parameters per layer type ({', '.join(rope)}) is not "
            "supported"
        )
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in SCALINGS:
        raise UnsupportedModelError(
            f"{fields.architecture} with rope type {kind!r} is not supported",
            hint=f"supported: {', '.join(SCALINGS)}",
        )
    allowed = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *PARAMETERS[kind]}
    for name in rope:
        if name not in allowed and rope[name] is not None:
            raise UnsupportedModelError(
                f"{fields.architecture} with {name} in a rope of type {kind!r} is not supported",
                hint=f"it may have {', '.join(sorted(allowed))}",
            )
    theta = _number(rope, "rope_theta", theta)
    partial = _number(rope, "partial_rotary_factor", partial)
    rotary_dim = int(head_dim * partial)
    if rotary_dim < 2 or rotary_dim > head_dim or rotary_dim % 2:
        raise CheckpointError(
            f"partial_rotary_factor is {partial} of a head of {head_dim}: {rotary_dim} numbers to "
            f"rotate; expected an even count from 2 to {head_dim}"
        )
    if kind in ("llama3", "yarn"):
        if original is not None:
            rope[ORIGINAL] = original
        trained_tokens = int(_number(rope, ORIGINAL, trained_tokens))
    parameters = tuple(
        (name, _number(rope, name, default))
        for name, default in PARAMETERS[kind].items()
        if rope.get(name) is not None or default is not OPTIONAL
    )
    return Rope(kind, theta, rotary_dim, trained_tokens, parameters)


def _number(rope: Mapping[str, object], name: str, default: float | None = None) -> float:
    value = rope.get(name)
    if value is None:
        value = default
    if not isinstance(value, int | float):
        raise CheckpointError(f"{name} of rope_parameters is {value!r}; expected a number")
    return float(value)


def _plain(rope: Rope) -> Tensor:
    """One frequency per rotated pair, from 1 down to about 1 / theta: [rotary_dim / 2] float64."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float64) / rope.rotary_dim
    return rope.theta**-exponents


def _default(rope: Rope, positions: int) -> tuple[Tensor, float]:
    """The frequencies as trained."""
    return _plain(rope), 1.0


def _linear(rope: Rope, positions: int) -> tuple[Tensor, float]:
    """Positions squeezed by a factor (position interpolation, arXiv 2306.15595)."""
    return _plain(rope) / dict(rope.parameters)["factor"], 1.0


def _dynamic(rope: Rope, positions: int) -> tuple[Tensor, float]:
    """Dynamic NTK: plain inside the trained context; beyond it every cached key would have to turn."""
    if positions > rope.trained_tokens:
        raise UnsupportedModelError(
            f"rope type 'dynamic' changes all angles beyond {rope.trained_tokens} tokens, which keys in "
            f"the cache cannot follow; the context is {positions}",
            hint=f"set max_model_len to {rope.trained_tokens} or less",
        )
    return _plain(rope), 1.0


def _llama3(rope: Rope, positions: int) -> tuple[Tensor, float]:
    """Llama 3.1: slow pairs squeezed by a factor, fast ones left, a ramp between the two."""
    given = dict(rope.parameters)
    frequencies = _plain(rope)
    turns = rope.trained_tokens * frequencies / (2 * math.pi)  # within the trained context
    low, high = given["low_freq_factor"], given["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / given["factor"]), 1.0


def _yarn(rope: Rope, positions: int) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071): a ramp over pairs, and sharper attention through the amplitude."""
    given = dict(rope.parameters)
    factor = given["factor"]
    frequencies = _plain(rope)
    first = _pair_with_turns(rope, given["beta_fast"])
    last = _pair_with_turns(rope, given["beta_slow"])
    if given["truncate"]:
        first, last = float(math.floor(first)), float(math.ceil(last))
    first, last = max(first, 0.0), min(last, float(rope.rotary_dim - 1))
    if first == last:
        last += 0.001  # a step instead of a ramp
    pairs = torch.arange(rope.rotary_dim // 2, dtype=torch.float64)
    squeezed = ((pairs - first) / (last - first)).clamp(0, 1)
    amplitude = given.get("attention_factor")
    if amplitude is None:
        amplitude = _yarn_amplitude(factor, 1.0)
        if given.get("mscale") and given.get("mscale_all_dim"):
            numerator = _yarn_amplitude(factor, given["mscale"])
            amplitude = numerator / _yarn_amplitude(factor, given["mscale_all_dim"])
    return frequencies * (1 - squeezed + squeezed / factor), amplitude


def _pair_with_turns(rope: Rope, turns: float) -> float:
    """The (fractional) pair that makes so many full turns within the trained context."""
    wanted = 2 * math.pi * turns / rope.trained_tokens
    return -rope.rotary_dim / 2 * math.log(wanted) / math.log(rope.theta)


def _yarn_amplitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


OPTIONAL = math.inf
"""Stands for a parameter that may be absent."""

SCALINGS: dict[str, Callable[[Rope, int], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}

PARAMETERS: dict[str, dict[str, float | None]] = {
    "default": {},
    "linear": {"factor": None},
    "dynamic": {"factor": None},
    "llama3": {
        "factor": None,
        "low_freq_factor": None,
        "high_freq_factor": None,
        ORIGINAL: OPTIONAL,
    },
    "yarn": {
        "factor": None,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": 1.0,
        "attention_factor": OPTIONAL,
        "mscale": OPTIONAL,
        "mscale_all_dim": OPTIONAL,
        ORIGINAL: OPTIONAL,
    },
}
"""By kind of scaling: its parameters with their defaults; None where there is none."""
