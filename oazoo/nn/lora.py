"""LoRA: a low-rank correction beside a frozen linear layer (arXiv:2106.09685)."""

from __future__ import annotations

from oazoo.errors import UsageError
from oazoo.nn.dropout import Dropout
from oazoo.nn.initial import by_width
from oazoo.nn.layers import Adapter
from oazoo.nn.module import Parameter
from oazoo.runtime import Tensor
from oazoo.runtime.ops.arithmetic import scaled
from oazoo.runtime.ops.linear import linear
from oazoo.runtime.ops.low_rank import LowRank


class LoRA(Adapter):
    """``scale · B A dropout(x)``; B begins at zero, so that nothing changes before the first step.

    Args:
        in_features, out_features: of the layer it stands beside.
        rank: rows of A, columns of B.
        alpha: the scale is ``alpha / rank``, or ``alpha / sqrt(rank)`` if rank-stabilised (arXiv:2312.03732).
        dropout: how much of x is dropped in training.

    Raises:
        UsageError: a rank or a scale that cannot be.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        alpha: float,
        dropout: float = 0.0,
        rank_stabilised: bool = False,
    ) -> None:
        if not 1 <= rank <= min(in_features, out_features):
            raise UsageError(
                f"a rank of {rank} for a layer from {in_features} to {out_features} features; it must be 1 to "
                f"{min(in_features, out_features)}"
            )
        if not 0 < alpha < float("inf"):
            raise UsageError(f"alpha must be a positive number, not {alpha}")
        self.a = Parameter(rank, in_features, initial=by_width)
        self.b = Parameter(out_features, rank)
        self.dropout = Dropout(dropout)
        self.rank, self.alpha, self.rank_stabilised = rank, alpha, rank_stabilised

    @property
    def scale(self) -> float:
        """What B A is multiplied with."""
        return self.alpha / (self.rank**0.5 if self.rank_stabilised else self.rank)

    def __call__(self, x: Tensor) -> Tensor:
        """f32 [tokens, in_features] to [tokens, out_features]."""
        low = linear(self.dropout(x), [self.a.tensor])
        return linear(scaled(low, self.scale), [self.b.tensor])

    def low_rank(self) -> LowRank | None:
        """The correction itself, unless inputs are dropped."""
        if self.dropout.training and self.dropout.rate:
            return None
        return LowRank(self.a.tensor, self.b.tensor, self.scale)
