"""Mamba-3 checkpoints of the state-spaces/mamba repository: config.json with ``d_model`` and ``ssm_cfg``, names that begin
with ``backbone.``. Both directions.
"""

from __future__ import annotations

import math
from typing import Any

from oazoo.configs import Mamba3Config
from oazoo.configs.mamba3 import A_FORMS
from oazoo.errors import TranslationError
from oazoo.translators.exporter import Exporter, Outgoing
from oazoo.translators.rules import Identity, Ignored, Rule, Slice, Transform
from oazoo.translators.settings import Settings
from oazoo.translators.translator import Checkpoint, Translation, Translator

_NAMES = {
    "embed": "backbone.embedding",
    "norm": "backbone.norm_f",
    "head": "lm_head",
    "layer.norm": "norm",
    "layer.mlp_norm": "norm2",
    "layer.mlp.up": "mlp.fc1",
    "layer.mlp.gate": "mlp.fc1",
    "layer.mlp.down": "mlp.fc2",
}


def source_name(target: str) -> str:
    """The published name of a parameter."""
    at, rest = "", target
    if target.startswith("layers."):
        _, number, rest = target.split(".", 2)
        at = f"backbone.layers.{number}."
        if rest.startswith("mixer."):
            return at + rest
        rest = f"layer.{rest}"
    return f"{at}{_NAMES[rest.removesuffix('.weight')]}.weight"


def rules(config: Mamba3Config) -> list[Rule]:
    """The map; run backwards for export."""
    inner = config.mlp_width
    # The first half of fc1 gives values, the second their gates.
    halves = {"up": Slice(0, 0, inner, 2 * inner), "gate": Slice(0, inner, 2 * inner, 2 * inner)}

    def transform(target: str) -> Transform:
        return halves.get(target.split(".")[-2], Identity()) if ".mlp." in target else Identity()

    return [Rule(target, (source_name(target),), transform(target)) for target in config.parameters()]


def _translate(checkpoint: Checkpoint) -> Translation:
    settings, source = checkpoint.settings(), checkpoint.source
    block = Settings(settings.get("ssm_cfg"), f"{settings.where}: ssm_cfg")
    if settings.get("attn_layer_idx"):
        raise TranslationError(
            f"{settings.where}: attn_layer_idx is not empty: layers of attention are not supported"
        )
    if not settings.boolean("rms_norm", True):
        raise TranslationError(f"{settings.where}: rms_norm = false (LayerNorm) is not supported")
    hidden, used = settings.integer("d_model"), settings.integer("vocab_size")
    multiple = settings.integer("pad_vocab_size_multiple", 8)
    if multiple <= 0:
        raise TranslationError(f"{settings.where}: pad_vocab_size_multiple = {multiple} must be positive")
    expand = block.number("expand", 2.0)
    if not 0 < hidden <= 1 << 20 or not 0 < expand <= 1 << 10:
        raise TranslationError(f"{settings.where}: d_model = {hidden} or expand = {expand} is out of range")
    mimo = block.boolean("is_mimo", False)
    config = Mamba3Config(
        vocab_size=-(-used // multiple) * multiple,
        used_vocab_size=used,
        hidden_size=hidden,
        num_layers=settings.integer("n_layer"),
        inner_size=int(expand * hidden),
        head_dim=block.integer("headdim", 64),
        state_size=block.integer("d_state", 128),
        num_groups=block.integer("ngroups", 1),
        rope_fraction=block.number("rope_fraction", 0.5),
        mimo_rank=block.integer("mimo_rank", 4) if mimo else None,
        output_norm=block.boolean("is_outproj_norm", False),
        mlp_size=settings.integer("d_intermediate", 0),
        tied_embeddings=settings.boolean("tie_embeddings", True),
        a_floor=block.number("A_floor", 1e-4),
        dt_min=block.number("dt_min", 1e-3),
        dt_max=block.number("dt_max", 0.1),
        dt_init_floor=block.number("dt_init_floor", 1e-4),
        chunk_size=block.integer("chunk_size") if "chunk_size" in block else None,
        residual_in_f32=settings.boolean("residual_in_fp32", True),
    )
    notes = [
        "the checkpoint does not state the form of A: that of the reference since June 2026 is used (heavy_tail); "
        "for an older one say --set a_form=softplus",
    ]
    ignored, equal = [], []
    if config.tied_embeddings and "lm_head.weight" in source:
        ignored.append(Ignored(r"lm_head\.weight", "a copy of the tied embedding"))
        equal.append(("lm_head.weight", "backbone.embedding.weight"))
    return Translation(config, rules(config), ignored, notes, equal, {"a_form": A_FORMS})


def _export(config: Mamba3Config) -> Outgoing:
    if config.a_form != "heavy_tail":
        raise TranslationError(f"no setting of it states a_form = {config.a_form}")
    # The padding that was used: the largest power of two that gives the rows there are, 8 where it does.
    multiples = [8, *(1 << n for n in range(24))]
    padded = (m for m in multiples if -(-config.used_vocab_size // m) * m == config.vocab_size)
    block: dict[str, Any] = {
        "layer": "Mamba3",
        "d_state": config.state_size,
        "expand": _ratio(config.inner_size, config.hidden_size),
        "headdim": config.head_dim,
        "ngroups": config.num_groups,
        "rope_fraction": config.rope_fraction,
        "dt_min": config.dt_min,
        "dt_max": config.dt_max,
        "dt_init_floor": config.dt_init_floor,
        "A_floor": config.a_floor,
        "is_outproj_norm": config.output_norm,
        "is_mimo": config.mimo_rank is not None,
    }
    if config.mimo_rank is not None:
        block["mimo_rank"] = config.mimo_rank
    if config.chunk_size is not None:
        block["chunk_size"] = config.chunk_size
    settings = {
        "d_model": config.hidden_size,
        "d_intermediate": config.mlp_size,
        "n_layer": config.num_layers,
        "vocab_size": config.used_vocab_size,
        "ssm_cfg": block,
        "attn_layer_idx": [],
        "attn_cfg": {},
        "rms_norm": True,
        "residual_in_fp32": config.residual_in_f32,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": next(padded, config.vocab_size),
        "tie_embeddings": config.tied_embeddings,
    }
    return Outgoing("hf", "Mamba3", settings, rules(config), alone=True)


def _ratio(inner: int, hidden: int) -> int | float:
    """``expand``: whole if it can be, else such that it gives the width again."""
    if inner % hidden == 0:
        return inner // hidden
    ratio = inner / hidden
    return ratio if int(ratio * hidden) == inner else math.nextafter(ratio, math.inf)


TRANSLATORS = (Translator("mamba3", "Mamba-3", ("hf:Mamba3",), _translate),)
EXPORTERS = (Exporter("mamba3", "hf", "Mamba3", _export),)
