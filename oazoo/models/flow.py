"""The flow denoiser: a Transformer that says, for noisy tokens at a time and under a condition, where they are to move."""

from __future__ import annotations

from oazoo.configs import FlowConfig
from oazoo.errors import DeviceError
from oazoo.models.flow_tokens import wave_positions
from oazoo.nn.flow import (
    FlowBlock,
    FlowTimeEmbedding,
    MakeExperts,
    conditions,
    norm,
)
from oazoo.nn.initial import normal, zeros
from oazoo.nn.layers import Embedding, Linear
from oazoo.nn.module import Module, ModuleList, Parameter
from oazoo.nn.moe import Mixture, MoE
from oazoo.runtime import Device, Tensor
from oazoo.runtime.ops import flow as ops
from oazoo.runtime.ops.activation import activate
from oazoo.runtime.ops.arithmetic import fill, reshaped, split_columns
from oazoo.runtime.ops.elementwise import dequantize
from oazoo.runtime.tape import checkpoint


class TimeMLP(Module):
    """``down(silu(up(x)))`` of the time embedding."""

    def __init__(self, features: int, width: int) -> None:
        self.up = Linear(features, width)
        self.down = Linear(width, width)

    def __call__(self, x: Tensor) -> Tensor:
        """f32 [sequences, features] to [sequences, width]."""
        return self.down(activate(self.up(x), "silu"))


class FlowDenoiser(Module):
    """Input projection, positions, time and condition, flow blocks, output projection.

    ``h = input_proj(sample) + position; c = time_embedding(t) + condition; output_proj(final_norm(blocks(h, c)))``.
    With the style ``"dit"`` the time embedding goes through an MLP, the last norm is modulated by the condition, and
    positions are given waves that :meth:`freeze_positions` keeps from learning.

    Args:
        config: sizes and style.
        device: where it runs; its parameters are not loaded yet.
    """

    def __init__(self, config: FlowConfig, device: Device) -> None:
        hidden, dit = config.hidden_size, config.style == "dit"
        self.config, self.device = config, device
        #: Share of conditions that are dropped in :meth:`drop`; for classifier-free guidance.
        self.condition_dropout = 0.0
        #: Whether blocks keep nothing inside on the way forward and compute it again on the way back.
        self.checkpointing = False
        self.position = Parameter(config.tokens, hidden, initial=normal(0.02))
        if dit:
            self.position.initial = lambda rng, shape: wave_positions(config)
        self.input_proj = Linear(config.token_size, hidden)
        self._times = FlowTimeEmbedding(
            config.frequency_size, config.time_period, config.time_scale, cosine_first=dit
        )
        self.time_mlp = TimeMLP(config.frequency_size, hidden) if dit else None
        self.condition_proj = Linear(config.condition_features, hidden) if config.condition_features else None
        self.class_embedding = Embedding(config.num_classes + 1, hidden) if config.num_classes else None
        experts = _experts(config) if config.num_experts else None
        self.blocks = ModuleList(
            [
                FlowBlock(
                    hidden,
                    config.intermediate_size,
                    config.num_heads,
                    eps=config.norm_eps,
                    silu=dit,
                    affine=not dit,
                    experts=experts,
                )
                for _ in range(config.num_layers)
            ]
        )
        self.final_modulation = Linear(hidden, 2 * hidden) if dit else None
        if self.final_modulation is not None:
            self.final_modulation.weight.initial = zeros
        self.final_norm = norm(hidden, config.norm_eps, not dit)
        self.output_proj = Linear(hidden, config.predicted_values)
        self.output_proj.weight.initial = zeros if dit else self.output_proj.weight.initial

    def freeze_positions(self) -> None:
        """Take no gradient with respect to positions that are not learned."""
        if self.config.style == "dit":
            self.position.tensor.requires_grad = False

    @property
    def null_class(self) -> int:
        """The number that stands for no class."""
        return self.config.num_classes

    def mixtures(self) -> list[Mixture]:
        """The mixtures of experts of its blocks."""
        return [module for module in self.modules() if isinstance(module, Mixture)]

    def drop(self, condition: Tensor | None) -> Tensor | None:
        """The condition, with a share of :attr:`condition_dropout` of its sequences told nothing; drawn on the device."""
        if condition is None:
            return None
        if self.class_embedding is not None:
            return ops.drop_ids(condition, self.condition_dropout, self.null_class)
        return ops.drop_rows(condition, self.condition_dropout)

    def __call__(
        self,
        sample: Tensor,
        time: Tensor | None = None,
        condition: Tensor | None = None,
        *,
        keep: Tensor | None = None,
    ) -> Tensor:
        """What the network predicts; see ``prediction`` of :class:`~oazoo.configs.FlowConfig`.

        Args:
            sample: f32 [sequences, tokens, token_size].
            time: f32 [sequences]; all 0, and nothing said of a condition, if None.
            condition: f32 [sequences, condition_features], or class numbers, i32 [sequences]; told nothing if None.
            keep: f32 [sequences, tokens]; tokens with 0 are seen by nobody.

        Returns:
            f32 [sequences, tokens, predicted_values].
        """
        config = self.config
        if len(sample.shape) != 3 or sample.shape[1:] != (config.tokens, config.token_size):
            raise DeviceError(
                f"a sample of shape {list(sample.shape)}; the model's are "
                f"[sequences, {config.tokens}, {config.token_size}]"
            )
        batch = sample.shape[0]
        h = self.input_proj(reshaped(sample, batch * config.tokens, config.token_size))
        h = ops.add_repeated(h, self._positions())
        c = self.conditioning(batch, time, condition)
        losses = any(m.training and (m.balance or m.z) for m in self.mixtures())
        if self.checkpointing and losses:
            raise DeviceError("losses of routers are not kept by recomputed layers; leave checkpointing out")
        for block in self.blocks:

            def run(x: Tensor, told: Tensor, block: FlowBlock = block) -> Tensor:
                return block(x, batch, told, keep=keep)

            h = checkpoint(run, h, c) if self.checkpointing else run(h, c)
        h = self.final_norm(h)
        if self.final_modulation is not None:
            h = ops.modulate(h, self.final_modulation(activate(c, "silu")), shift=0, scale=1)
        return reshaped(self.output_proj(h), batch, config.tokens, config.predicted_values)

    def velocity(
        self, sample: Tensor, time: Tensor, condition: Tensor | None = None, *, keep: Tensor | None = None
    ) -> Tensor:
        """The prediction itself, f32 [sequences, tokens, token_size]: what is said beyond it is left out."""
        y, size = self(sample, time, condition, keep=keep), self.config.token_size
        if self.config.predicted_values == size:
            return y
        wide = self.config.predicted_values
        rows = y.numel // wide
        first, _ = split_columns(reshaped(y, rows, wide), [size, wide - size])
        return reshaped(first, *sample.shape)

    def conditioning(self, batch: int, time: Tensor | None, condition: Tensor | None) -> Tensor:
        """The vector that modulates the blocks, f32 [sequences, hidden_size]."""
        config = self.config
        if time is None:
            # As OA has it: time 0, and a condition of zeros.
            time = fill(Tensor.empty(self.device, (batch,)), 0.0)
        t = self._times(time)
        if self.time_mlp is not None:
            t = self.time_mlp(t)
        told: Tensor | None = None
        if self.condition_proj is not None:
            if condition is None:
                condition = fill(Tensor.empty(self.device, (batch, config.condition_features)), 0.0)
            told = self.condition_proj(condition)
        elif self.class_embedding is not None:
            if condition is None:
                raise DeviceError(
                    f"say which classes: numbers from 0 to {config.num_classes}, the last for none"
                )
            told = self.class_embedding(condition)
        elif condition is not None:
            raise DeviceError("a condition for a model that takes none")
        c = conditions(t, told)
        assert c is not None
        return c

    def _positions(self) -> Tensor:
        kept = self.position.tensor
        return kept if kept.dtype == "f32" else dequantize(kept)


def _experts(config: FlowConfig) -> MakeExperts:
    return lambda: MoE(
        config.hidden_size,
        config.intermediate_size,
        config.num_experts,
        config.experts_per_token,
        eps=config.norm_eps,
        routing_bias=False,
    )
