"""Feed-forward layers with a gate."""

from __future__ import annotations

from collections.abc import Iterator

from oazoo.nn.layers import Linear, RMSNorm, by_rows, gated_linear
from oazoo.nn.module import Module, N
from oazoo.runtime import Tensor


class SwiGLU(Module):
    """``down(silu(gate(x)) * up(x))`` (arXiv:2002.05202). Its parameters are the three weights, then the three biases."""

    def __init__(self, features: int, inner: int, bias: bool = True) -> None:
        self.gate = Linear(features, inner, bias)
        self.up = Linear(features, inner, bias)
        self.down = Linear(inner, features, bias)

    def _named(self, prefix: str, kind: type[N], seen: set[int]) -> Iterator[tuple[str, N]]:
        yield from sorted(super()._named(prefix, kind, seen), key=lambda found: found[0].endswith(".bias"))

    def __call__(self, x: Tensor) -> Tensor:
        """f32 [..., features] to the same shape."""
        return by_rows(lambda x: self.down(gated_linear(x, self.gate, self.up)), x)


class FFN(Module):
    """``x + down(silu(gate(h)) * up(h))`` with ``h`` the RMSNorm of x."""

    def __init__(self, features: int, inner: int, eps: float = 1e-5, bias: bool = True) -> None:
        self.norm = RMSNorm(features, eps)
        self.gate = Linear(features, inner, bias)
        self.up = Linear(features, inner, bias)
        self.down = Linear(inner, features, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """f32 [..., features] to the same shape."""
        return by_rows(
            lambda x: self.down(gated_linear(x, self.gate, self.up, norm=self.norm), residual=x), x
        )
