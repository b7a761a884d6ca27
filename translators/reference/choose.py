"""From an opened checkpoint to something that gives its logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from oazoo.formats.source import WeightSource
from oazoo.translators.reference import gguf, hf, mamba3
from oazoo.translators.reference.description import Decoder, NoReferenceError
from oazoo.translators.reference.forward import decoder_logits
from oazoo.translators.reference.mamba3 import Mamba3, mamba3_logits
from oazoo.translators.reference.maths import Array
from oazoo.translators.reference.onnx_graph import fixed_length, onnx_logits
from oazoo.translators.settings import Settings


@dataclass(frozen=True)
class Reference:
    """A checkpoint that can be run as its own programs would. ``model`` is None for an ONNX graph, which says it itself."""

    source: WeightSource
    model: Decoder | Mamba3 | None
    #: Sequences can be no longer, if there is a limit.
    max_tokens: int | None = None

    @property
    def can_round(self) -> bool:
        """Whether the effect of rounding weights can be computed."""
        return self.model is not None

    def logits(
        self, sequences: Sequence[npt.NDArray[np.int64]], rounded: Mapping[str, str] | None = None
    ) -> list[Array]:
        """float32 [tokens, vocabulary] for each sequence of ids; ``rounded`` as for :func:`decoder_logits`."""
        if self.model is None:
            return onnx_logits(self.source.path, self.source.files, sequences)
        if isinstance(self.model, Mamba3):
            return mamba3_logits(self.source, self.model, sequences, rounded)
        return decoder_logits(self.source, self.model, sequences, rounded)


def reference_for(
    source: WeightSource,
    naming: str,
    config: Mapping[str, Any],
    declared: Sequence[str],
    chosen: Mapping[str, str] | None = None,
) -> Reference:
    """The reference of a checkpoint.

    Args:
        source: the opened checkpoint.
        naming: ``"hf"``, ``"gguf"``, ``"torch"`` or ``"onnx"``: whose names and settings it has.
        config: contents of config.json, or the container's metadata.
        declared: the architectures that it says it has.
        chosen: what it does not state and a person did.

    Raises:
        NoReferenceError: nothing is known of such a checkpoint.
    """
    try:
        if naming == "hf" and tuple(declared[:1]) == ("Mamba3",):
            return Reference(source, mamba3.describe(config, chosen or {}))
        reference = _reference(source, naming, config, declared)
        if isinstance(reference.model, Decoder):
            _try_positions(reference.model)
        return reference
    # Settings are read as their own programs do, without a check of each: the translator has done that.
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise NoReferenceError(
            f"a setting is missing or of a wrong type ({type(error).__name__}: {error})"
        ) from error


def _try_positions(model: Decoder) -> None:
    """Read what is read late, when a sequence is there: rotary settings of every layer, for short and long sequences."""
    if model.rotary is not None:
        for layer in range(min(model.layers, 4096)):
            for tokens in (1, 1 << 20):
                model.rotary(layer, tokens)


def _reference(
    source: WeightSource, naming: str, config: Mapping[str, Any], declared: Sequence[str]
) -> Reference:
    if naming == "hf":
        if not declared:
            raise NoReferenceError("config.json names no architecture")
        if declared[0] == "GPT2LMHeadModel" and "transformer.wte.weight" not in source:
            return Reference(source, hf.gpt2(config, ""))
        return Reference(source, hf.describe(config, declared[0]))
    if naming == "gguf":
        return Reference(source, gguf.describe(source, declared[0]))
    if naming == "torch":
        return Reference(source, _nanogpt(source, config))
    if naming == "onnx":
        return Reference(source, None, fixed_length(source.path))
    raise NoReferenceError("tensors without a model have no meaning to compare")


def _nanogpt(source: WeightSource, config: Mapping[str, Any]) -> Decoder:
    """nanoGPT's model: GPT-2 with PyTorch's linear layers and the exact GELU, its head tied to the embedding."""
    settings = Settings(config.get("model_args"), f"{source.path}: model_args")
    start = "model._orig_mod." if any(name.startswith("model._orig_mod.") for name in source) else "model."
    sizes = {key: settings.integer(key) for key in ("n_head", "n_embd", "n_layer")}
    base = hf.gpt2(
        {**sizes, "activation_function": "gelu", "layer_norm_epsilon": 1e-5}, f"{start}transformer."
    )
    head = f"{start}lm_head"
    return replace(base, transposed=False, head=head if f"{head}.weight" in source else base.head)
