"""EmpyrealmCore: one Mamba-3 mixer on a flat residual, over token ids, features, or vectors that are embedded already."""

from __future__ import annotations

from typing import Any

from oazoo.errors import UsageError
from oazoo.nn.layers import Embedding, Linear
from oazoo.nn.mamba3 import Mamba3Block
from oazoo.nn.module import Module
from oazoo.runtime import Device, Tensor
from oazoo.runtime.ops.mamba3 import Mamba3States


class EmpyrealmCore(Module):
    """``e + mixer(e)``, where e is what comes in, embedded or projected to the core's width; no norm.

    Without ``vocab_size`` and ``in_features`` there is neither table nor projection, and no parameters for them: what comes
    in has the core's width already, and is given to :meth:`forward_embedded` and :meth:`step_embedded`.

    Args:
        width: of the residual.
        vocab_size: token ids come in; 256 for bytes.
        in_features: f32 vectors of this size come in.
        options: of :class:`oazoo.nn.Mamba3Block`; its ``variant`` is ``"oa"`` unless another is named.

    Raises:
        UsageError: both a vocabulary and features, or options that a mixer cannot have.
    """

    def __init__(
        self, width: int, *, vocab_size: int | None = None, in_features: int | None = None, **options: Any
    ) -> None:
        if vocab_size is not None and in_features is not None:
            raise UsageError("a core reads token ids (vocab_size) or vectors (in_features), not both")
        self.embed = None if vocab_size is None else Embedding(vocab_size, width)
        self.project = None if in_features is None else Linear(in_features, width)
        self.mixer = Mamba3Block(width, **{"variant": "oa", **options})

    def embedded(self, x: Tensor) -> Tensor:
        """What comes in, at the core's width: ids (i32, u32 or u8 [...]) or f32 [..., in_features] to f32 [..., width].

        Raises:
            UsageError: the core takes only what is embedded already.
        """
        if self.embed is not None:
            return self.embed(x)
        if self.project is not None:
            return self.project(x)
        raise UsageError("this core has neither table nor projection: use forward_embedded and step_embedded")

    def __call__(self, x: Tensor) -> Tensor:
        """Whole sequences, each from its beginning: ids [batch, tokens] or f32 [batch, tokens, in_features] to f32 [batch,
        tokens, width].
        """
        return self.forward_embedded(self.embedded(x))

    def forward_embedded(self, x: Tensor) -> Tensor:
        """The same for f32 [batch, tokens, width]."""
        batch, tokens, width = x.shape
        flat = x.view(batch * tokens, width)
        return self.mixer(flat, batch, residual=flat).view(batch, tokens, width)

    def zero_state(self, batch: int, device: Device | None = None) -> Mamba3States:
        """The state of ``batch`` sequences before their first token."""
        return self.mixer.zero_state(batch, device)

    def step(self, x: Tensor, states: Mamba3States) -> Tensor:
        """One token more of each sequence: ids [batch] or f32 [batch, in_features] to f32 [batch, width]; ``states`` is
        replaced in place.
        """
        return self.step_embedded(self.embedded(x), states)

    def step_embedded(self, x: Tensor, states: Mamba3States) -> Tensor:
        """The same for f32 [batch, width]."""
        return self.mixer.step(x, states, residual=x)
