"""Hyper-connections: a residual stream of several, which each layer reads, writes and mixes by learned amounts."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tokamak.layers.beside import Beside
from tokamak.layers.build import Build
from tokamak.layers.norm import RMSNorm
from tokamak.layers.plain import Plain, around_one, fan_in
from tokamak.ops.norm import rms_norm
from tokamak.ops.residual_mix import (
    collapse_norm,
    collapse_streams,
    expand_streams,
    head_coefficients,
    mix_coefficients,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixing:
    """What all sites of a model share."""

    count: int
    """Streams."""
    width: int
    norm_eps: float
    mix_eps: float
    iterations: int


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Of one site and step, float32."""

    read: Tensor  # [tokens, streams]
    write: Tensor  # [tokens, streams]
    mix: Tensor  # [tokens, streams, streams], the stream that is read first


class MixSite:
    """The coefficients in front of one attention or feed-forward part; `fn`, `base` and `scale` are parameters."""

    def __init__(self, build: Build, mixing: Mixing) -> None:
        m = mixing
        outs = (2 + m.count) * m.count
        self.fn = Plain(build, (outs, m.count * m.width), draw=fan_in)
        self.base = Plain(build, (outs,))
        self.scale = Plain(build, (3,), draw=around_one)
        self._mixing = m
        self._coefficients = build.bind(mix_coefficients)
        self._expand = build.bind(expand_streams)
        self._beside = Beside("coefficients")

    def __call__(self, streams: Tensor) -> Coefficients:
        """streams: [tokens, streams, width]."""
        m = self._mixing
        found = self._coefficients(
            streams,
            self.fn.values,
            self.base.values,
            self.scale.values,
            m.norm_eps,
            m.mix_eps,
            m.iterations,
        )
        return Coefficients(*found)

    def beside(self, streams: Tensor) -> Coefficients:
        """The same beside what follows, where rows are few: nobody may use them, or let go of the streams, before `join`."""
        with self._beside.fork(streams.shape[0]):
            return self(streams)

    def join(self, streams: Tensor) -> None:
        """Let what follows use what `beside` found of these streams."""
        self._beside.join(streams.shape[0])

    def expand(
        self, y: Tensor, streams: Tensor, found: Coefficients, also: Tensor | None = None
    ) -> Tensor:
        """The streams behind a part that says y, and `also`, both [tokens, width]; returns [tokens, streams, width]."""
        return self._expand(y, streams, found.write, found.mix, also)


class StreamReader:
    """The weighted sum of the streams, [tokens, width], as it is or normed."""

    def __init__(self, build: Build) -> None:
        self._collapse = build.bind(collapse_streams)
        self._collapse_norm = build.bind_joined(collapse_norm, (collapse_streams, rms_norm))

    def __call__(self, streams: Tensor, read: Tensor) -> Tensor:
        """streams: [tokens, streams, width]; read: [tokens, streams] float32."""
        return self._collapse(streams, read)

    def normed(self, streams: Tensor, read: Tensor, norm: RMSNorm) -> Tensor:
        """The same through a norm, in one kernel where there is one."""
        if self._collapse_norm is None:
            return norm(self(streams, read))
        return self._collapse_norm(streams, read, norm.weight.values, norm.eps)


class HeadMix:
    """How the vocabulary head reads the streams, where that is learned; a site without writing and mixing."""

    def __init__(self, build: Build, mixing: Mixing) -> None:
        m = mixing
        self.fn = Plain(build, (m.count, m.count * m.width), draw=fan_in)
        self.base = Plain(build, (m.count,))
        self.scale = Plain(build, (1,), draw=around_one)
        self._mixing = m
        self._coefficients = build.bind(head_coefficients)

    def __call__(self, streams: Tensor) -> Tensor:
        """streams: [tokens, streams, width]; returns float32 [tokens, streams]."""
        m = self._mixing
        return self._coefficients(
            streams, self.fn.values, self.base.values, self.scale.values, m.norm_eps, m.mix_eps
        )
