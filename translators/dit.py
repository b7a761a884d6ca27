"""Checkpoints of DiT and SiT, as facebookresearch publishes them: a state dict, in a ``.pt`` or a SafeTensors file.

The two share their names and mathematics and differ in what the network says: DiT the noise and its variance, at steps from
0 to 999, SiT a velocity, at times from 0 (noise) to 1 (data). No file says which it is, nor how many heads there are: a
``config.json`` beside it does (``architectures``: ``["DiT"]`` or ``["SiT"]``, ``num_heads``), or who converts it. All else
follows from shapes. Sources: https://github.com/facebookresearch/DiT and https://github.com/willisma/SiT, ``models.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from oazoo.configs import FlowConfig
from oazoo.errors import TranslationError
from oazoo.formats.source import WeightSource
from oazoo.translators.rules import Array, Identity, Ignored, Reshape, Rule, Shape, Slice, Transform
from oazoo.translators.translator import Checkpoint, Translation, Translator

#: What both have in their code: the eps of the norms, and the time embedding.
_EPS, _PERIOD, _SCALE = 1e-6, 10_000.0, 1.0
#: Wrappers of a training checkpoint, best first; what the others hold is left behind.
_PREFIXES = ("", "ema.", "model.")
_NAMES = {
    "input_proj": "x_embedder.proj",
    "time_mlp.up": "t_embedder.mlp.0",
    "time_mlp.down": "t_embedder.mlp.2",
    "class_embedding": "y_embedder.embedding_table",
    "final_modulation": "final_layer.adaLN_modulation.1",
    "output_proj": "final_layer.linear",
}
_BLOCK = {
    "attn.o": "attn.proj",
    "ffn.up": "mlp.fc1",
    "ffn.down": "mlp.fc2",
    "modulation": "adaLN_modulation.1",
}


@dataclass(frozen=True, slots=True)
class SwapRows(Transform):
    """Rows [outer · inner, ...] in the order [inner · outer, ...]: what changed slowest then changes fastest."""

    outer: int
    inner: int

    @property
    def name(self) -> str:
        """The transform as the plan shows it."""
        return f"SwapRows({self.outer} × {self.inner})"

    def shape(self, sources: Sequence[Shape]) -> Shape:
        """[outer · inner, ...] → the same."""
        if len(sources) != 1 or not sources[0] or sources[0][0] != self.outer * self.inner:
            raise TranslationError(f"{self.name}: the source has the shape {[list(s) for s in sources]}")
        return sources[0]

    def apply(self, sources: Sequence[Array]) -> Array:
        """A copy with its rows in the other order."""
        rows = sources[0].reshape(self.outer, self.inner, *sources[0].shape[1:])
        return rows.swapaxes(0, 1).reshape(sources[0].shape)

    def inverse(self, rule: Rule) -> list[Rule]:
        """The other way round."""
        return [Rule(rule.sources[0], (rule.target,), SwapRows(self.inner, self.outer))]


def prefix_of(source: WeightSource) -> str | None:
    """What stands before the names of a DiT or SiT; None if it is no such checkpoint."""
    return next((p for p in _PREFIXES if f"{p}x_embedder.proj.weight" in source), None)


def rules(config: FlowConfig, prefix: str = "") -> list[Rule]:
    """The map; fused q, k and v are cut apart, and outputs of a patch put in the order of its inputs."""
    hidden, pixels = config.hidden_size, config.patch**2
    found = []
    for target, shape in config.parameters().items():
        stem, _, suffix = target.rpartition(".")
        transform: Transform = Identity()
        if target == "position":
            name, transform = "pos_embed", Reshape((1, *shape), shape)
        elif stem.startswith("blocks."):
            _, number, part = stem.split(".", 2)
            at = f"blocks.{number}."
            if part in ("attn.q", "attn.k", "attn.v"):
                first = "qkv".index(part[-1]) * hidden
                name, transform = f"{at}attn.qkv.{suffix}", Slice(0, first, first + hidden, 3 * hidden)
            else:
                name = f"{at}{_BLOCK[part]}.{suffix}"
        else:
            name = f"{_NAMES[stem]}.{suffix}"
            if target == "input_proj.weight":
                transform = Reshape((hidden, config.image_channels, config.patch, config.patch), shape)
            elif stem == "output_proj":
                transform = SwapRows(pixels, shape[0] // pixels)
        found.append(Rule(target, (prefix + name,), transform))
    return found


def _translate(checkpoint: Checkpoint, prediction: str) -> Translation:
    source, settings = checkpoint.source, checkpoint.settings()
    prefix = prefix_of(source)
    if prefix is None:
        raise TranslationError(f"{source.path}: has no x_embedder.proj.weight, so it is no DiT or SiT")

    def shape(name: str, axes: int) -> Shape:
        if prefix + name not in source:
            raise TranslationError(f"{source.path}: the checkpoint lacks {prefix}{name}")
        found = source[prefix + name].info.shape
        if len(found) != axes or not all(found):
            raise TranslationError(f"{source.path}: {prefix}{name} has shape {list(found)}, not {axes} axes")
        return found

    hidden, channels, patch, across = shape("x_embedder.proj.weight", 4)
    if patch != across:
        raise TranslationError(f"{source.path}: patches of {patch} × {across} are not square")
    _, tokens, _ = shape("pos_embed", 3)
    side = math.isqrt(tokens)
    if side * side != tokens:
        raise TranslationError(f"{source.path}: {tokens} positions are no square of patches")
    values = patch * patch * channels
    predicted = shape("final_layer.linear.weight", 2)[0]
    if predicted not in (values, 2 * values):
        raise TranslationError(
            f"{source.path}: the last layer gives {predicted} values for a patch of {values}: neither a prediction nor one "
            "with its variance"
        )
    if "num_heads" not in settings:
        raise TranslationError(
            f"{source.path}: no shape tells how many heads the attention of width {hidden} has; say it: --heads N (the "
            "published S, B, L and XL have 6, 12, 16 and 16), or num_heads in a config.json beside the file"
        )
    if settings.number("class_dropout_prob", 0.1) == 0:
        raise TranslationError(
            f"{settings.where}: class_dropout_prob = 0: a table without a row of no class is not supported"
        )
    rows, _ = shape("y_embedder.embedding_table.weight", 2)
    layers = 0
    while f"{prefix}blocks.{layers}.attn.qkv.weight" in source:
        layers += 1
    config = FlowConfig(
        tokens=tokens,
        token_size=values,
        predicted_values=predicted,
        hidden_size=hidden,
        intermediate_size=shape("blocks.0.mlp.fc1.weight", 2)[0],
        num_layers=layers,
        num_heads=settings.integer("num_heads"),
        style="dit",
        prediction=prediction,
        num_classes=rows - 1,
        frequency_size=shape("t_embedder.mlp.0.weight", 2)[1],
        time_period=_PERIOD,
        time_scale=_SCALE,
        norm_eps=_EPS,
        image_height=side * patch,
        image_width=side * patch,
        image_channels=channels,
        patch=patch,
    )
    notes = [
        f"the table of classes has {rows:,} rows: {rows - 1:,} classes, and the last row stands for none",
        "it makes latents of an image codec, which is not part of it: samples are arrays",
    ]
    if prediction == "noise":
        notes.append("DiT says noise, not a velocity: it runs forward; oazoo sample does not integrate it")
    if predicted == 2 * values:
        notes.append(
            "half of the last layer's values are a variance, which sampling does not use; they are kept"
        )
    others = [p for p in (*_PREFIXES, "opt.") if p and p != prefix]
    ignored = [Ignored(rf"{p[:-1]}\..*", "another copy, or state of the training") for p in others]
    ignored.append(Ignored(r"(train_steps|epoch|step)", "progress of the training"))
    return Translation(config, rules(config, prefix), ignored if prefix else (), notes)


TRANSLATORS = (
    Translator("dit", "DiT (forward)", ("hf:DiT", "torch:DiT"), lambda c: _translate(c, "noise")),
    Translator("sit", "SiT", ("hf:SiT", "torch:SiT"), lambda c: _translate(c, "sit_velocity")),
)
__all__ = ["TRANSLATORS", "SwapRows", "prefix_of", "rules"]
