"""Running a model with a LoRA adapter beside its weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from oazoo.errors import FormatError, UsageError
from oazoo.formats.oam import OamSource
from oazoo.generation.text_model import TextModel
from oazoo.models import CausalModel
from oazoo.nn.lora import LoRA
from oazoo.training.lora import linear_layers
from oazoo.zoo.adapters import base_warnings, bound_adapter


def use_adapter(model: TextModel, adapter: str | Path, notify: Callable[[str], None] | None = None) -> None:
    """Put a LoRA adapter beside the weights of a loaded model, which stay as they are.

    Args:
        model: from :func:`oazoo.load`.
        adapter: a folder as PEFT saves it, or one SafeTensors file that holds its config too.
        notify: told when the adapter was trained on other weights.

    Raises:
        UsageError: there is no such adapter, or the model has one already.
        FormatError: it is damaged, or not for this model; every tensor of it must find its layer.
    """
    causal = model.model
    if not isinstance(causal, CausalModel):
        raise UsageError(f"{model.name} is not a model on the device, so it takes no adapter")
    with OamSource(Path(str(model.info["path"]))) as source:
        found, pairs = bound_adapter(source, adapter)
        for line in base_warnings(found, source):
            (notify or (lambda line: None))(line)
    layers = linear_layers(causal)
    for name in pairs:
        if name not in layers:
            raise FormatError(f"{adapter}: {name} is no linear layer of {model.name}")
        if layers[name].adapter is not None:
            raise UsageError(f"{model.name} has an adapter already; merge it first (oazoo merge)")
    for name, pair in pairs.items():
        out_features, in_features = pair.b.shape[0], pair.a.shape[1]
        module = LoRA(in_features, out_features, pair.rank, pair.alpha, rank_stabilised=pair.rslora)
        module.a.assign(pair.a, causal.device)
        module.b.assign(pair.b, causal.device)
        layers[name].adapter = module
