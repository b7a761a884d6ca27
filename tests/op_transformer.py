"""A small language model written with ops alone, in OA's order of parameters: what training tests train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from oazoo.runtime import Tensor, get_device
from oazoo.runtime.ops.activation import activate
from oazoo.runtime.ops.elementwise import add
from oazoo.runtime.ops.embedding import embedding
from oazoo.runtime.ops.linear import linear
from oazoo.runtime.ops.loss import cross_entropy
from oazoo.runtime.ops.norm import layer_norm
from oazoo.runtime.ops.sequences import attend


@dataclass(frozen=True)
class Sizes:
    vocabulary: int
    context: int
    width: int
    hidden: int
    layers: int
    heads: int

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Of all parameters: token and position table, then per block norm, q, k, v, o, norm, up, down, then norm, head."""
        w, f, v = self.width, self.hidden, self.vocabulary
        block: list[tuple[int, ...]] = [
            (w,),
            (w,),
            *[(w, w), (w,)] * 4,
            (w,),
            (w,),
            (f, w),
            (f,),
            (w, f),
            (w,),
        ]
        return [(v, w), (self.context, w), *block * self.layers, (w,), (w,), (v, w), (v,)]


class Transformer:
    """``add(token, position)``, pre-norm blocks with GELU, norm, untied head."""

    def __init__(self, sizes: Sizes, batch: int, arrays: Sequence[npt.NDArray[np.float32]]) -> None:
        self.sizes, self.batch = sizes, batch
        places = np.tile(np.arange(sizes.context, dtype=np.int32), batch)
        self.places = Tensor.from_numpy(get_device(), places)
        self.tensors = [Tensor.from_numpy(get_device(), np.asarray(a, np.float32)) for a in arrays]
        assert [t.shape for t in self.tensors] == sizes.shapes
        for tensor in self.tensors:
            tensor.requires_grad = True

    @classmethod
    def random(cls, sizes: Sizes, batch: int, seed: int = 0) -> Transformer:
        rng = np.random.default_rng(seed)
        arrays = [
            (rng.standard_normal(s) * (0.1 if len(s) == 2 else 0.05) + (len(s) == 1 and 0.5)).astype(
                np.float32
            )
            for s in sizes.shapes
        ]
        return cls(sizes, batch, arrays)

    def logits(self, tokens: Tensor) -> Tensor:
        """f32 [rows, vocabulary] for i32 [rows], sequences of the context's length one after the other."""
        sizes, p = self.sizes, iter(self.tensors)
        x = add(embedding(tokens, next(p)), embedding(self.places, next(p)))
        for _ in range(sizes.layers):
            h = layer_norm(x, next(p), next(p), 1e-5)
            (qw, qb, kw, kb, vw, vb) = (next(p) for _ in range(6))
            mixed = attend(linear(h, [qw, kw, vw], [qb, kb, vb]), self.batch, sizes.heads)
            x = linear(mixed, next(p), next(p), residual=x)
            h = layer_norm(x, next(p), next(p), 1e-5)
            x = linear(activate(linear(h, next(p), next(p)), "gelu_tanh"), next(p), next(p), residual=x)
        return linear(layer_norm(x, next(p), next(p), 1e-5), next(p), next(p))

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(self.logits(tokens), targets)
