"""What a run trains: a preset's new model or an imported one, what of it learns, and what its files say."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from oazoo import __version__
from oazoo.configs import ModelConfig
from oazoo.errors import TranslationError, UsageError
from oazoo.formats.oam import OamSource
from oazoo.formats.oam_layout import OamConfig, OamOptimizer
from oazoo.generation.text_model import TextModel
from oazoo.models import CausalModel, build
from oazoo.nn.dropout import Dropout
from oazoo.nn.lora import LoRA
from oazoo.runtime import Device, Tensor
from oazoo.text import BaseTokenizer, ChatTemplate
from oazoo.text.files import EXAMPLE_SUFFIXES, TEXT_SUFFIXES, data_files
from oazoo.text.vocabulary import learn_vocabulary
from oazoo.training.checkpoints import ModelFile, own_copy
from oazoo.training.lora import LoraSettings, attach
from oazoo.translators.lora import LoraMap, choose_layers, lora_map
from oazoo.zoo.adapters import base_facts, declared_architectures
from oazoo.zoo.files import open_file
from oazoo.zoo.presets import preset
from oazoo.zoo.train_settings import TrainSettings

Floats = npt.NDArray[np.float32]


@dataclass
class Subject:
    """What is trained: the module, what of it learns, and what its files say."""

    name: str
    kind: str
    model: CausalModel
    config: ModelConfig
    tokenizer: BaseTokenizer
    template: ChatTemplate | None
    file: ModelFile
    identity: dict[str, Any]
    adapters: dict[str, LoRA] | None = None
    lora: LoraSettings | None = None
    map: LoraMap | None = None
    base: dict[str, Any] | None = None
    optimizer: OamOptimizer | None = None

    def learning(self) -> list[tuple[str, Tensor]]:
        """Names and tensors of the parameters that learn, in the order of files."""
        if self.adapters is None:
            found = dict(self.model.named_parameters())
            return [(name, found[name].tensor) for name in self.config.parameters() if name in found]
        return [
            (f"{layer}.{part}", parameter.tensor)
            for layer, adapter in self.adapters.items()
            for part, parameter in (("lora_a", adapter.a), ("lora_b", adapter.b))
        ]

    def weights(self) -> dict[str, Floats]:
        """Their values, as files have them."""
        if self.adapters is None:
            return self.model.state_dict()
        return {name: tensor.numpy() for name, tensor in self.learning()}

    def load(self, values: Mapping[str, Floats]) -> None:
        """Put values back in place."""
        if self.adapters is None:
            self.model.load_state_dict(values)
            return
        for name, tensor in self.learning():
            tensor.write(values[name])


def new_model(name: str, settings: TrainSettings, data: Sequence[Path], device: Device) -> Subject:
    """A preset's model with first values, its vocabulary learned from the data where it needs one."""
    chosen = preset(name)
    context = settings.context or chosen.context
    files = data_files(data, suffixes=(*TEXT_SUFFIXES, *EXAMPLE_SUFFIXES))
    vocabulary = learn_vocabulary(chosen.vocabulary, files, chosen.vocab_size)
    config = chosen.config(vocabulary.size, context)
    model = build(config, device)
    model.initialize(device, settings.seed)
    _set_dropout(model, settings.dropout, name)
    document = {
        "oazoo": 1,
        "family": config.family,
        "model": config.to_json(),
        "source": {"format": "trained", "name": name, "architecture": []},
        "generation": {"eos_ids": list(vocabulary.eos_ids)},
        "tokenizer": {},
        "tool": f"oazoo {__version__}",
    }
    file = ModelFile(_oam_config(config, document), {vocabulary.asset: vocabulary.definition})
    identity = {"model": name, "config": config.to_json()}
    return Subject(name, "new", model, config, vocabulary.tokenizer, None, file, identity)


def _set_dropout(model: CausalModel, rate: float, name: str) -> None:
    """Dropout in the model itself, where its architecture has any.

    Raises:
        UsageError: it has none.
    """
    if rate and not any(isinstance(module, Dropout) for module in model.modules()):
        raise UsageError(
            f"{name}: models of the family {type(model).__name__} have no dropout; leave --dropout out"
        )
    model.set_dropout(rate)


def _oam_config(config: ModelConfig, document: Mapping[str, Any]) -> OamConfig:
    return OamConfig(
        architecture=config.family,
        d_model=config.hidden_size,
        n_layers=config.num_layers,
        vocab_size=config.vocab_size,
        weight_dtype="f32",
        payload=json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode(),
    )


def imported_model(
    loaded: TextModel, settings: TrainSettings, lora: LoraSettings | None, targets: Sequence[str]
) -> Subject:
    """A loaded model, made ready to learn: all of its weights, or corrections beside its linear layers.

    Raises:
        UsageError: all weights of a quantised model were to learn, or targets that name nothing.
    """
    model, path = loaded.model, Path(str(loaded.info["path"]))
    if not isinstance(model, CausalModel):
        raise UsageError(f"{loaded.name} is not a model on the device: only those can be trained")
    config: ModelConfig = loaded.info["config"]
    with open_file(path) as source:
        assert isinstance(source, OamSource)
        packed = sorted({t.info.encoding for t in source.values()} & {"q4", "q8"})
        facts, declared = base_facts(source), declared_architectures(source)
        optimizer = own_copy(source.optimizer)
        document = {k: v for k, v in source.metadata.items() if k not in ("receipt", "quantization")}
        assets = {
            name.removeprefix("asset/"): tensor.raw().tobytes()
            for name, tensor in source.state.items()
            if name.startswith("asset/") and tensor.info.encoding == "u8"
        }
    identity = {"model": facts["weights"], "config": config.to_json()}
    subject = Subject(
        loaded.name,
        "full",
        model,
        config,
        loaded.tokenizer,
        loaded.chat_template,
        ModelFile(_oam_config(config, document), assets),
        identity,
        base=facts,
        optimizer=optimizer if settings.compat == "oa" else None,
    )
    if lora is not None and settings.dropout:
        raise UsageError("the frozen model keeps no dropout; that of the corrections is --lora-dropout")
    if lora is None:
        if packed:
            raise UsageError(
                f"{path}: its weights are quantised ({', '.join(packed)}), and quantised weights do not learn. Train "
                "corrections beside them (--lora 8), or unpack the model first: "
                f"oazoo quantize {path.name} --to f32 -o OUT.oam"
            )
        model.to_f32().requires_grad_()
        _set_dropout(model, settings.dropout, loaded.name)
        return subject
    subject.map = _published(config, declared)
    names = choose_layers(config, targets, None if subject.map is None else subject.map.places)
    subject.adapters = attach(model, names, lora, model.device, settings.seed)
    subject.kind, subject.lora = "lora", lora
    identity |= {"lora": lora.to_json(), "layers": names}
    return subject


def _published(config: ModelConfig, declared: Sequence[str]) -> LoraMap | None:
    """Where layers are in the published model; None if there is no published model of this kind."""
    try:
        return lora_map(config, declared)
    except TranslationError:
        return None
