"""Mixtures of experts: feed-forward layers of which a router sends each token through a few."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from oazoo.errors import UsageError
from oazoo.nn.feed_forward import SwiGLU
from oazoo.nn.initial import by_width
from oazoo.nn.layers import Linear, RMSNorm, by_rows, gated_linear
from oazoo.nn.module import Buffer, Module, Parameter
from oazoo.runtime import Tensor
from oazoo.runtime.ops.grouped import expert_mlp, few_slots
from oazoo.runtime.ops.linear import observed
from oazoo.runtime.ops.routing import (
    Groups,
    Routing,
    add_loads,
    balance_bias,
    combine,
    group_chosen,
    group_tokens,
    route,
    router_loss,
    spread,
)
from oazoo.runtime.tape import taping


class ExpertLinear(Module):
    """The linear layers of all experts: a stack of weights [experts, out, in], and of biases [experts, out]."""

    def __init__(self, experts: int, in_features: int, out_features: int, bias: bool = True) -> None:
        self.weight = Parameter(experts, out_features, in_features, initial=by_width)
        if bias:
            self.bias = Parameter(experts, out_features)
        self.has_bias = bias

    @property
    def bias_tensor(self) -> Tensor | None:
        """The biases, if there are any."""
        return self.bias.tensor if self.has_bias else None


@dataclass(frozen=True)
class RouteStatistics:
    """How busy experts are.

    Attributes:
        loads: tokens that each expert has had.
        entropy: of the shares, from 0 (one expert has all) to 1 (all have the same).
        max_load_ratio: the largest load as a multiple of the mean.
        dead: how many have had none.
    """

    loads: npt.NDArray[np.uint32]
    entropy: float
    max_load_ratio: float
    dead: int

    @classmethod
    def of(cls, loads: npt.NDArray[np.uint32]) -> RouteStatistics:
        """From loads; entropy and ratio of nothing are 0."""
        total = int(loads.sum())
        shares = loads / max(1, total)
        some = shares[shares > 0]
        entropy = float(-(some * np.log(some)).sum() / np.log(loads.size)) if loads.size > 1 else 1.0
        return cls(loads, entropy + 0.0, float(shares.max() * loads.size), int((loads == 0).sum()))


class Mixture(Module):
    """What mixtures have in common: routing, and what keeps it balanced. Subclasses give the layers.

    Attributes:
        per_token: experts that each token goes to.
        normalize: whether the weights of a token add up to 1.
        sparse: False sends every token through every expert, with weights of 0: slow, the same result.
        balance, z: factors of the losses that are computed in training (:func:`oazoo.runtime.ops.routing.router_loss`).
        counting: whether the loads of experts are counted, for :meth:`statistics` and :meth:`update_routing_bias`.
        loss: the losses of the last forward pass, f32 [1]; None if there are none.
    """

    router: Linear
    routing_bias: Buffer | None = None

    def __init__(self, experts: int, per_token: int, *, normalize: bool = True) -> None:
        if not 1 <= per_token <= experts:
            raise UsageError(f"tokens cannot go to {per_token} of {experts} experts")
        self.experts, self.per_token, self.normalize = experts, per_token, normalize
        self.sparse = True
        self.balance = self.z = 0.0
        self.counting = False
        self.loss: Tensor | None = None
        self._loads: Tensor | None = None

    @property
    def choice_bias(self) -> Tensor | None:
        """What is added to logits for the choice of experts alone, f32 [experts]; None if there is no such thing."""
        return None if self.routing_bias is None else self.routing_bias.tensor

    @abstractmethod
    def run_experts(self, h: Tensor, groups: Groups) -> Tensor:
        """Every slot through its expert: f32 [tokens, features] to [slots, features]."""

    def mixed(self, h: Tensor, residual: Tensor | None = None) -> Tensor:
        """``residual + Σ weight · expert(h)`` over the experts that each token goes to; f32 [tokens, features]."""
        routing = route(self.router(h), self.per_token, bias=self.choice_bias, normalize=self.normalize)
        tokens = h.shape[0]
        losses = self.training and bool(self.balance or self.z)
        weights = list(self._expert_weights())
        exact = taping(h, routing.weights, *weights) or losses or self.counting or observed()
        exact = exact or any(w.shape[0] < self.experts for w in weights)  # split over several buffers
        few = self.sparse and not exact and few_slots(tokens, self.per_token, self.experts)
        groups = group_tokens(routing, sort=not few)
        if self.counting:
            add_loads(self._counts(h), groups)
        self.loss = router_loss(routing, groups, balance=self.balance, z=self.z) if losses else None
        if self.sparse:
            return combine(self.run_experts(h, groups), groups, routing.weights, residual=residual)
        everywhere = _everywhere(routing)
        return combine(
            self.run_experts(h, everywhere), everywhere, spread(routing.weights, routing), residual=residual
        )

    def _expert_weights(self) -> Iterator[Tensor]:
        for module in self.modules():
            if isinstance(module, ExpertLinear):
                yield from module.weight.shards

    def _counts(self, h: Tensor) -> Tensor:
        if self._loads is None:
            with h.device.aside():
                self._loads = Tensor.from_numpy(h.device, np.zeros(self.experts, np.uint32))
        return self._loads

    def statistics(self) -> RouteStatistics:
        """How busy experts were since counting began, or the last :meth:`update_routing_bias`; waits for the device."""
        found = np.zeros(self.experts, np.uint32) if self._loads is None else self._loads.numpy()
        return RouteStatistics.of(found)

    def update_routing_bias(self, rate: float) -> None:
        """Favour experts with less than the mean load by ``rate``, the others the less; counting starts anew.

        Raises:
            UsageError: loads are not counted, or there is no bias.
        """
        bias = self.choice_bias
        if bias is None or self._loads is None:
            what = (
                "has no bias for the choice of experts" if bias is None else "has counted no loads (counting)"
            )
            raise UsageError(f"this mixture {what}")
        balance_bias(bias, self._loads, rate)


def _everywhere(routing: Routing) -> Groups:
    """Every token to every expert."""
    tokens, experts = routing.logits.shape
    device = routing.logits.device
    numbers = np.tile(np.arange(experts, dtype=np.uint32), (tokens, 1))
    with device.aside():
        chosen = Tensor.from_numpy(device, numbers)
    return group_chosen(chosen, experts)


class MoE(Mixture):
    """``x + Σ weight · SwiGLU_e(h)`` with h the RMSNorm of x, over the experts that each token goes to, as OA has it.

    The probabilities of a token's experts are divided by their sum. Parameters: gate above up [experts, 2 inner, features],
    down, both with biases; norm; router; then those of each shared expert.

    Args:
        features: of x.
        inner: width of each expert.
        experts: how many.
        per_token: experts that each token goes to.
        shared: experts besides, through which every token goes with weight 1.
        eps: of the norm.
        bias: whether linear layers have one.
        routing_bias: whether there is a bias for the choice of experts; kept, not learned.
    """

    def __init__(
        self,
        features: int,
        inner: int,
        experts: int,
        per_token: int,
        *,
        shared: int = 0,
        eps: float = 1e-5,
        bias: bool = True,
        routing_bias: bool = True,
    ) -> None:
        super().__init__(experts, per_token)
        self.gate_up = ExpertLinear(experts, features, 2 * inner, bias)
        self.down = ExpertLinear(experts, inner, features, bias)
        self.norm = RMSNorm(features, eps)
        self.router = Linear(features, experts, bias)
        self.shared = [SwiGLU(features, inner, bias) for _ in range(shared)]
        if routing_bias:
            self.routing_bias = Buffer(experts)

    def run_experts(self, h: Tensor, groups: Groups) -> Tensor:
        gate_up, down = self.gate_up, self.down
        return expert_mlp(
            h, groups, [gate_up.weight.shards], down.weight.shards, [gate_up.bias_tensor], down.bias_tensor
        )

    def __call__(self, x: Tensor) -> Tensor:
        """f32 [..., features] to the same shape."""
        return by_rows(lambda x: self.rows(x, x), x)

    def rows(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """The same of f32 [tokens, features], added to ``residual`` or to nothing."""
        h = self.norm(x)
        y = self.mixed(h, residual)
        for expert in self.shared:
            y = expert.down(gated_linear(h, expert.gate, expert.up), residual=y)
        return y
