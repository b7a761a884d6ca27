"""Multi-head attention over whole sequences."""

from __future__ import annotations

from oazoo.nn.dropout import Dropout
from oazoo.nn.layers import Linear, project
from oazoo.nn.module import Module
from oazoo.runtime import Tensor
from oazoo.runtime.ops.sequences import attend


class MultiHeadAttention(Module):
    """``o(softmax(q kᵀ / sqrt(head_dim) + mask) v)`` for every head (arXiv:1706.03762), without storing the scores.

    Head h is columns ``h · head_dim`` on of q, k and v.

    Args:
        width: of the residual stream, a multiple of ``heads``.
        heads: number of heads.
        causal: a token sees itself and those before it; a mask that is given takes the place of this.
        bias: whether the four linear layers have one.
        dropout: rate at which weights of keys are dropped while training.
    """

    def __init__(
        self, width: int, heads: int, *, causal: bool = True, bias: bool = True, dropout: float = 0.0
    ) -> None:
        self.q = Linear(width, width, bias)
        self.k = Linear(width, width, bias)
        self.v = Linear(width, width, bias)
        self.o = Linear(width, width, bias)
        self.heads = heads
        self.causal = causal
        self.dropout = Dropout(dropout)

    def __call__(
        self,
        x: Tensor,
        batch: int = 1,
        *,
        mask: Tensor | None = None,
        keep: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Attend within each sequence.

        Args:
            x: f32 [batch · tokens, width], sequences one after the other.
            batch: number of sequences.
            mask: f32 [batch · heads · tokens, tokens], added to the scaled scores.
            keep: f32 [batch, tokens]; keys with 0 are seen by nobody.
            residual: f32 like x, added to the result.

        Returns:
            f32 [batch · tokens, width].
        """
        qkv = project(x, [self.q, self.k, self.v])
        causal = self.causal and mask is None
        rate = self.dropout.now
        mixed = attend(qkv, batch, self.heads, causal=causal, mask=mask, keep=keep, dropout=rate)
        return self.o(mixed, residual=residual)
