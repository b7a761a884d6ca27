"""A flow model that is loaded: samples images and sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from oazoo.configs import FlowConfig
from oazoo.errors import UsageError
from oazoo.generation.flow_steps import SAMPLERS, FlowSteps, noise_levels
from oazoo.models.flow import FlowDenoiser
from oazoo.models.flow_tokens import from_tokens

#: Sequences that are sampled together.
BATCH = 64
MAX_COUNT = 1 << 20


@dataclass(frozen=True)
class FlowSamples:
    """What was sampled.

    Attributes:
        values: f32 [count, height, width, channels] of images, or [count, tokens, values] of sequences, in the data's units.
        classes: the class of each, int32 [count]; None for models without classes.
        seed: that gives them again.
    """

    values: npt.NDArray[np.float32]
    classes: npt.NDArray[np.int32] | None
    seed: int


class FlowModel:
    """A flow model on the device.

    Args:
        model: the network, its weights loaded.
        info: ``name``, ``path``, ``config`` and what else loading found out.
    """

    def __init__(self, model: FlowDenoiser, info: Mapping[str, Any] | None = None) -> None:
        self.model, self.info = model, dict(info or {})
        self._steps: dict[tuple[Any, ...], FlowSteps] = {}

    @property
    def name(self) -> str:
        """The model's name."""
        return str(self.info.get("name", "model"))

    @property
    def config(self) -> FlowConfig:
        """Its configuration."""
        return self.model.config

    def sample(
        self,
        classes: int | Sequence[int] | None = None,
        count: int | None = None,
        *,
        steps: int = 20,
        sampler: str = "euler",
        schedule: str = "uniform",
        shift: float = 3.0,
        guidance: float = 1.0,
        seed: int = 0,
        conditions: npt.ArrayLike | None = None,
        mask: npt.ArrayLike | None = None,
        captured: bool = True,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> FlowSamples:
        """Images or sequences from noise.

        One seed gives the same ones on a device: sequence i begins with the i-th noise of the seed.

        Args:
            classes: one class for all, or a class for each; if None all classes in turn. The number of classes itself stands
                for none.
            count: how many; as many as ``classes`` or ``conditions`` if None, else 1.
            steps: of the sampler.
            sampler: ``euler``, ``midpoint``, ``heun`` or ``rk4``, which ask the model 1, 2, 2 and 4 times a step.
            schedule: ``uniform``, ``cosine`` or ``shifted`` (by ``shift``); see
                :func:`oazoo.generation.flow_steps.noise_levels`.
            guidance: scale of classifier-free guidance; 1 for none, with half the work.
            seed: of the noise.
            conditions: f32 [count, condition_features] of a model that takes them; one row serves all.
            mask: [count, tokens] or [tokens], 0 for tokens that are not there; their values come out as 0.
            captured: off, steps are run anew instead of being replayed; the result is the same.
            progress: called with a label, sequences done, and all.

        Raises:
            UsageError: classes or conditions that the model does not have, or numbers out of range.
        """
        config = self.config
        told, number = self._told(classes, count, conditions)
        if not 1 <= number <= MAX_COUNT:
            raise UsageError(f"{number} samples: there must be 1 to {MAX_COUNT:,}")
        if not np.isfinite(guidance) or abs(guidance) > 1e6:
            raise UsageError(f"a guidance scale of {guidance} cannot be meant")
        if not 0 <= seed < 1 << 64:
            raise UsageError(f"a seed is from 0 to 2^64 - 1, not {seed}")
        levels = noise_levels(steps, schedule, shift)
        keep = self._keep(mask, number)
        # Equal batches: one captured step serves all, and what fills up the last is thrown away.
        batches = -(-number // BATCH)
        size = -(-number // batches)
        key = (size, sampler, guidance != 1, keep is not None, captured)
        if key not in self._steps:
            # The program and its memory belong to one size: keep one.
            made = FlowSteps(
                self.model, size, sampler, guided=key[2], masked=keep is not None, captured=captured
            )
            self._steps = {key: made}
        taken = self._steps[key]
        parts: list[npt.NDArray[np.float32]] = []
        for first in range(0, number, size):
            rows = np.minimum(np.arange(first, first + size), number - 1)
            parts.append(
                taken(
                    seed,
                    first,
                    levels,
                    condition=None if told is None else told[rows],
                    keep=None if keep is None else keep[rows],
                    guidance=guidance,
                )
            )
            if progress is not None:
                progress("sampling", min(first + size, number), number)
        values = from_tokens(config, np.concatenate(parts)[:number])
        if keep is not None and not config.is_image:
            values = values * keep[:, :, None]
        return FlowSamples(
            values, told.astype(np.int32) if config.num_classes and told is not None else None, seed
        )

    def _told(
        self, classes: int | Sequence[int] | None, count: int | None, conditions: npt.ArrayLike | None
    ) -> tuple[npt.NDArray[Any] | None, int]:
        """What the model is told of each sequence, and how many there are."""
        config = self.config
        if conditions is not None and not config.condition_features:
            raise UsageError(f"{self.name} takes no conditions")
        if classes is not None and not config.num_classes:
            raise UsageError(f"{self.name} knows no classes")
        if config.condition_features:
            if conditions is None:
                raise UsageError(f"{self.name} needs conditions, [count, {config.condition_features}]")
            rows = np.atleast_2d(np.asarray(conditions, np.float32))
            if rows.ndim != 2 or rows.shape[1] != config.condition_features or not np.isfinite(rows).all():
                raise UsageError(
                    f"conditions must be finite numbers, [count, {config.condition_features}], not {list(rows.shape)}"
                )
            number = len(rows) if count is None else count
            if len(rows) not in (1, number):
                raise UsageError(f"{len(rows)} conditions for {number} samples")
            return np.ascontiguousarray(np.broadcast_to(rows, (number, rows.shape[1]))), number
        if not config.num_classes:
            return None, 1 if count is None else count
        several = [] if classes is None else [classes] if isinstance(classes, int) else list(classes)
        for value in several:
            if isinstance(value, bool) or not 0 <= int(value) <= config.num_classes:
                raise UsageError(
                    f"{self.name} has the classes 0 to {config.num_classes - 1} ({config.num_classes} is none of them), "
                    f"not {value}"
                )
        number = count if count is not None else max(1, len(several))
        if not 1 <= number <= MAX_COUNT:
            raise UsageError(f"{number} samples: there must be 1 to {MAX_COUNT:,}")
        if not several:
            return (np.arange(number) % config.num_classes).astype(np.int32), number
        return np.resize(np.array(several, np.int32), number), number

    def _keep(self, mask: npt.ArrayLike | None, count: int) -> npt.NDArray[np.float32] | None:
        if mask is None:
            return None
        rows = np.atleast_2d(np.asarray(mask, np.float32))
        tokens = self.config.tokens
        if rows.ndim != 2 or rows.shape[1] != tokens or len(rows) not in (1, count):
            raise UsageError(f"a mask must be [{count}, {tokens}] or [{tokens}], not {list(rows.shape)}")
        return np.ascontiguousarray(np.broadcast_to((rows != 0).astype(np.float32), (count, tokens)))


__all__ = ["SAMPLERS", "FlowModel", "FlowSamples"]
