"""RNN and GRU: cells, and stacks of them over sequences (batch first)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from oazoo.errors import DeviceError
from oazoo.nn.initial import glorot
from oazoo.nn.layers import Linear
from oazoo.nn.module import Module, ModuleList, Parameter
from oazoo.runtime import Tensor
from oazoo.runtime.ops.arithmetic import fill, reshaped
from oazoo.runtime.ops.recurrent import Cell, last_state, recurrence
from oazoo.shaders.kernels import CELL_GATES


class StateWeights(Module):
    """What multiplies the state: a weight in any encoding, and a bias."""

    def __init__(self, hidden: int, wide: int, bias: bool) -> None:
        self.weight = Parameter(wide, hidden, initial=glorot)
        if bias:
            self.bias = Parameter(wide)
        self.has_bias = bias


class RecurrentCell(Module):
    """One layer: ``input`` brings tokens in, ``state`` carries on what was.

    The weights of both have rows for each gate, in the order of :func:`oazoo.runtime.ops.recurrent.recurrence`.
    """

    cell: ClassVar[Cell]

    def __init__(self, in_features: int, hidden: int, bias: bool = True) -> None:
        wide = CELL_GATES[self.cell] * hidden
        self.input = Linear(in_features, wide, bias)
        self.state = StateWeights(hidden, wide, bias)
        self.hidden = hidden

    def __call__(self, x: Tensor, state: Tensor | None = None) -> Tensor:
        """One token of each sequence: f32 [batch, in_features] and [batch, hidden] (zeros if None) to [batch, hidden]."""
        return self.sequence(x, state, x.shape[0])

    def sequence(
        self, x: Tensor, state: Tensor | None = None, batch: int = 1, *, into: Tensor | None = None
    ) -> Tensor:
        """Whole sequences, all of one length.

        Args:
            x: f32 [batch · tokens, in_features], sequences one after the other.
            state: f32 [batch, hidden], the states before; zeros if None.
            batch: sequences.
            into: f32 [batch, hidden] to write the states after the last tokens to; may be ``state``. Without gradients.

        Returns:
            f32 [batch · tokens, hidden]: the states after each token.
        """
        bias = self.state.bias.tensor if self.state.has_bias else None
        return recurrence(
            self.cell, self.input(x), self.state.weight.tensor, bias, state, batch=batch, into=into
        )


class RNNCell(RecurrentCell):
    """``h' = tanh(x W_ihᵀ + b_ih + h W_hhᵀ + b_hh)`` (Elman, Cognitive Science 14, 1990)."""

    cell = "rnn"


class GRUCell(RecurrentCell):
    """A gated recurrent unit (arXiv:1406.1078), the reset gate after the product as in PyTorch and cuDNN."""

    cell = "gru"


class _Stack(Module):
    """Layers one on the other, each reading the states of the one below.

    Args:
        in_features: of a token.
        hidden: units of each layer.
        num_layers: how many.
        bias: whether each has both of its biases.
    """

    _kind: ClassVar[type[RecurrentCell]]

    def __init__(self, in_features: int, hidden: int, num_layers: int = 1, bias: bool = True) -> None:
        if num_layers < 1:
            raise DeviceError(f"a stack of {num_layers} recurrent layers; there must be one at least")
        widths = [in_features, *[hidden] * (num_layers - 1)]
        self.layers = ModuleList([self._kind(width, hidden, bias) for width in widths])
        self.hidden = hidden

    def zero_state(self, batch: int) -> list[Tensor]:
        """The state before anything: f32 [batch, hidden] of zeros a layer."""
        device = next(iter(self.layers)).state.weight.tensor.device
        return [fill(Tensor.empty(device, (batch, self.hidden)), 0.0) for _ in self.layers]

    def _given(self, state: Sequence[Tensor] | None) -> Sequence[Tensor | None]:
        if state is not None and len(state) != len(self.layers):
            raise DeviceError(f"{len(state)} states for {len(self.layers)} recurrent layers")
        return [None] * len(self.layers) if state is None else state

    def forward(self, x: Tensor, state: Sequence[Tensor] | None = None) -> tuple[Tensor, list[Tensor]]:
        """Whole sequences.

        Args:
            x: f32 [batch, tokens, in_features].
            state: f32 [batch, hidden] a layer; zeros if None.

        Returns:
            The last layer's states after each token, f32 [batch, tokens, hidden], and the state after all, as ``state``.
        """
        if len(x.shape) != 3 or not x.numel:
            raise DeviceError(f"sequences are [batch, tokens, features], not {list(x.shape)}")
        batch, tokens, features = x.shape
        y, after = reshaped(x, batch * tokens, features), []
        for layer, before in zip(self.layers, self._given(state), strict=True):
            y = layer.sequence(y, before, batch)
            after.append(last_state(y, batch))
        return reshaped(y, batch, tokens, self.hidden), after

    __call__ = forward

    def step(self, x: Tensor, state: Sequence[Tensor] | None = None) -> tuple[Tensor, list[Tensor]]:
        """One token of each sequence: f32 [batch, in_features] to [batch, hidden], and the state after it."""
        after: list[Tensor] = []
        for layer, before in zip(self.layers, self._given(state), strict=True):
            x = layer(x, before)
            after.append(x)
        return x, after


class RNN(_Stack):
    """Layers of :class:`RNNCell`."""

    _kind = RNNCell


class GRU(_Stack):
    """Layers of :class:`GRUCell`."""

    _kind = GRUCell


#: Cells by the name that configurations have for them.
CELLS: dict[str, type[RecurrentCell]] = {"rnn": RNNCell, "gru": GRUCell}
