"""What puts layers together: a Transformer block, and layers one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from oazoo.nn.attention import MultiHeadAttention
from oazoo.nn.dropout import Dropout
from oazoo.nn.layers import LayerNorm, Linear, activated_linear
from oazoo.nn.module import Buffer, Module, Parameter
from oazoo.runtime import Tensor
from oazoo.runtime.ops.elementwise import add


class MLP(Module):
    """``down(gelu(up(x)))``, GELU in its tanh form."""

    def __init__(self, width: int, inner: int, bias: bool = True) -> None:
        self.up = Linear(width, inner, bias)
        self.down = Linear(inner, width, bias)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """f32 [tokens, width] to the same; ``residual`` is added to the result."""
        return self.down(activated_linear(x, self.up, "gelu_tanh"), residual=residual)


class TransformerBlock(Module):
    """``x += attn(norm1(x)); x += ffn(norm2(x))`` with LayerNorm and GELU (GPT-2's block).

    Args:
        width: of the residual stream, a multiple of ``heads``.
        inner: width of the feed-forward layer.
        heads: attention heads.
        eps: of the norms.
        causal: a token sees itself and those before it.
        dropout: rate at which each sublayer's output, and weights of keys, are dropped while training.
    """

    def __init__(
        self,
        width: int,
        inner: int,
        heads: int,
        *,
        eps: float = 1e-5,
        causal: bool = True,
        dropout: float = 0.0,
    ) -> None:
        self.norm1 = LayerNorm(width, eps)
        self.attn = MultiHeadAttention(width, heads, causal=causal, dropout=dropout)
        self.norm2 = LayerNorm(width, eps)
        self.ffn = MLP(width, inner)
        self.dropout = Dropout(dropout)

    def __call__(
        self, x: Tensor, batch: int = 1, *, mask: Tensor | None = None, keep: Tensor | None = None
    ) -> Tensor:
        """f32 [batch · tokens, width] to the same; ``mask`` and ``keep`` as the attention takes them."""
        if self.dropout.now:
            x = add(x, self.dropout(self.attn(self.norm1(x), batch, mask=mask, keep=keep)))
            return add(x, self.dropout(self.ffn(self.norm2(x))))
        x = self.attn(self.norm1(x), batch, mask=mask, keep=keep, residual=x)
        return self.ffn(self.norm2(x), residual=x)


class Sequential(Module):
    """Layers, or functions of a tensor, one after the other; parameters are named by the layer's index."""

    def __init__(self, *layers: Callable[[Tensor], Tensor]) -> None:
        self.layers = layers

    def children(self) -> Iterator[tuple[str, Parameter | Buffer | Module]]:
        for name, child in super().children():
            yield name.removeprefix("layers."), child

    def __call__(self, x: Tensor) -> Tensor:
        """The last layer's output."""
        for layer in self.layers:
            x = layer(x)
        return x
