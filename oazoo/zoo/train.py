"""``train`` and ``finetune``: from a preset or a model and text to a run's folder with its best model.

A run's folder holds ``best.oam`` (lowest validation loss, or the last step without validation), resumable checkpoints,
``log.csv``, ``curves.png`` where matplotlib is installed, and after LoRA ``adapter/`` in PEFT's layout.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from oazoo import __version__
from oazoo.configs import ModelConfig
from oazoo.errors import TranslationError, UsageError
from oazoo.formats.lora import Adapter, LoraPair, write_adapter
from oazoo.formats.oam import OamSource
from oazoo.formats.oam_layout import OamConfig
from oazoo.generation.text_model import TextModel
from oazoo.models import CausalModel, build
from oazoo.nn.dropout import Dropout
from oazoo.nn.lora import LoRA
from oazoo.runtime import Device, Tensor, get_device
from oazoo.text import BaseTokenizer, ChatTemplate, Tokenizer
from oazoo.text.files import EXAMPLE_SUFFIXES, TEXT_SUFFIXES, data_files, vocabulary_texts
from oazoo.text.train import byte_tokenizer_json, train_byte_level
from oazoo.training.batches import Batch, Batches, one_pass
from oazoo.training.callbacks import Callback, EarlyStopping
from oazoo.training.checkpoints import ModelFile, RunFolder, checkpoints, latest_checkpoint
from oazoo.training.control import TrainingControl
from oazoo.training.csv_log import CsvLog
from oazoo.training.curves import draw_curves
from oazoo.training.data import Part, everything, load_data, split
from oazoo.training.documents import Documents
from oazoo.training.language import HeldOutLoss, LanguageStepper
from oazoo.training.loop import Trainer
from oazoo.training.lora import LoraSettings, attach
from oazoo.training.records import Summary
from oazoo.training.rows import make_rows
from oazoo.training.section import from_section, to_section
from oazoo.translators.lora import LoraMap, choose_layers, lora_map, to_published
from oazoo.zoo.adapters import base_facts, declared_architectures
from oazoo.zoo.files import open_file
from oazoo.zoo.presets import preset
from oazoo.zoo.progress import Progress
from oazoo.zoo.train_settings import TrainSettings

#: Longest rows unless longer ones are asked for: attention's cost grows with their square.
_CONTEXT = 512
_VALIDATION_TOKENS = 1 << 15
LOG, CURVES = "log.csv", "curves.png"
Floats = npt.NDArray[np.float32]
Notify = Callable[[str], None]


@dataclass(frozen=True)
class TrainPlan:
    """What a run will do, before it does it."""

    model: str
    parameters: int
    trained: int
    rows: int
    tokens_per_epoch: int
    validation_tokens: int
    context: int
    steps: int
    lr: float
    memory_bytes: int
    device: str

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self)


@dataclass
class _Subject:
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

    def learning(self) -> list[tuple[str, Tensor]]:
        """Names and tensors of the parameters that learn, in the order of files."""
        if self.adapters is None:
            return [(name, parameter.tensor) for name, parameter in self.model.named_parameters()]
        return [
            (f"{layer}.{part}", parameter.tensor)
            for layer, adapter in self.adapters.items()
            for part, parameter in (("lora_a", adapter.a), ("lora_b", adapter.b))
        ]

    def weights(self) -> dict[str, Floats]:
        """Their values, as files have them."""
        if self.adapters is None:
            return {name: p.values() for name, p in self.model.named_parameters()}
        return {name: tensor.numpy() for name, tensor in self.learning()}

    def load(self, values: Mapping[str, Floats]) -> None:
        """Put values back in place."""
        if self.adapters is None:
            self.model.load_state_dict(values)
            return
        for name, tensor in self.learning():
            tensor.write(values[name])


def new_model(name: str, settings: TrainSettings, data: Sequence[Path], device: Device) -> _Subject:
    """A preset's model with first values, its vocabulary learned from the data where it needs one."""
    chosen = preset(name)
    context = settings.context or chosen.context
    if chosen.vocab_size is None:
        definition = byte_tokenizer_json()
    else:
        files = data_files(data, suffixes=(*TEXT_SUFFIXES, *EXAMPLE_SUFFIXES))
        definition = train_byte_level(vocabulary_texts(files), chosen.vocab_size)
    ends = [] if chosen.vocab_size is None else [0]  # the control token that ends a text comes first
    tokenizer = Tokenizer(definition, eos_ids=ends)
    vocabulary = 256 if chosen.vocab_size is None else tokenizer.vocab_size
    config = chosen.config(vocabulary, context)
    model = build(config, device)
    model.initialize(device, settings.seed)
    _set_dropout(model, settings.dropout, name)
    document = {
        "oazoo": 1,
        "family": config.family,
        "model": config.to_json(),
        "source": {"format": "trained", "name": name, "architecture": []},
        "generation": {"eos_ids": ends},
        "tokenizer": {},
        "tool": f"oazoo {__version__}",
    }
    file = ModelFile(_oam_config(config, document), {"tokenizer.json": definition})
    identity = {"model": name, "config": config.to_json()}
    return _Subject(name, "new", model, config, tokenizer, None, file, identity)


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
) -> _Subject:
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
        document = {k: v for k, v in source.metadata.items() if k not in ("receipt", "quantization")}
        assets = {
            name.removeprefix("asset/"): tensor.raw().tobytes()
            for name, tensor in source.state.items()
            if name.startswith("asset/") and tensor.info.encoding == "u8"
        }
    identity = {"model": facts["weights"], "config": config.to_json()}
    subject = _Subject(
        loaded.name,
        "full",
        model,
        config,
        loaded.tokenizer,
        loaded.chat_template,
        ModelFile(_oam_config(config, document), assets),
        identity,
        base=facts,
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


class Run:
    """A training run that is ready to begin or to go on: :attr:`plan` says what it will do, :meth:`fit` does it.

    Args:
        subject: what is trained.
        data: files and folders.
        settings: how.
        output: the run's folder; None only to plan.
        resume: go on from the newest checkpoint in it.
        callbacks: told of what happens.
        control: steers the run from outside.
        raw: examples are plain text, without the model's chat template.
        validation_data: files to validate on, in place of a part of the data.
        progress, notify: told of what is read, and of what is worth knowing.
    """

    def __init__(
        self,
        subject: _Subject,
        data: Sequence[Path],
        settings: TrainSettings,
        output: Path | None,
        *,
        resume: bool = False,
        callbacks: Sequence[Callback] = (),
        control: TrainingControl | None = None,
        raw: bool = False,
        validation_data: Sequence[Path] = (),
        progress: Progress | None = None,
        notify: Notify | None = None,
    ) -> None:
        say = notify or (lambda line: None)
        self.subject, self.output = subject, output
        if output is not None and not resume and checkpoints(output):
            raise UsageError(
                f"{output}: holds a run already; go on with it (--resume), or name another folder"
            )
        longest = subject.model.max_positions
        context = settings.context or min(longest, _CONTEXT)
        if context > longest:
            raise UsageError(
                f"rows of {context} tokens are longer than the {longest} positions of {subject.name}"
            )

        def load(files: Sequence[Path]) -> Documents:
            return load_data(
                files,
                subject.tokenizer,
                template=subject.template,
                special=settings.special,
                raw=raw,
                progress=progress,
            )

        documents = load(data)
        part, held = _parts(documents, settings, load(validation_data) if validation_data else None)
        if documents.continuous and context >= part.tokens:
            raise UsageError(
                f"rows of {context} tokens are longer than the {part.tokens} tokens of the data; shorten them (--context)"
            )
        rows = make_rows(part, context, shift=True, seed=settings.seed)
        for line in rows.report.warnings():
            say(line)
        batches = Batches(
            rows, documents, settings.batch_size, accumulate=settings.accumulate, seed=settings.seed
        )
        steps = settings.steps or max(1, math.ceil(settings.epochs * batches.steps_per_epoch))
        lr = settings.rate(subject.kind)
        checks: list[Batch] = []
        if held is not None:
            held_rows = make_rows(held, context, seed=settings.seed)
            most = max(1, _VALIDATION_TOKENS // (context * settings.batch_size))
            checks = list(one_pass(held_rows, settings.batch_size, limit=most))
        learning = subject.learning()
        self.plan = TrainPlan(
            model=subject.name,
            parameters=sum(math.prod(p.shape) for p in subject.model.parameters()),
            trained=sum(tensor.numel for _, tensor in learning),
            rows=rows.count,
            tokens_per_epoch=rows.report.targets,
            validation_tokens=sum(batch.tokens for batch in checks),
            context=context,
            steps=steps,
            lr=lr,
            memory_bytes=_memory(subject, settings, context),
            device=subject.model.device.info.name,
        )
        optimizer = settings.make_optimizer(learning, lr)
        stepper = LanguageStepper(
            subject.model,
            optimizer,
            clip=settings.clip or None,
            accumulate=settings.accumulate,
            seed=settings.seed,
        )
        # How long the run is may change when it goes on; everything else decides what its next step is.
        same = {k: v for k, v in settings.to_json().items() if k not in _MAY_CHANGE}
        self._run = {**subject.identity, "data": batches.digest, "settings": same}
        folder, log = None, list[Callback]()
        if output is not None:
            log = [CsvLog(output / LOG, resumed=resume)]
            folder = RunFolder(
                output,
                model=subject.file,
                weights=subject.weights,
                optimizer=lambda: to_section(optimizer),
                run=self._run,
            )
        every = max(1, steps // 10)
        self.trainer = Trainer(
            stepper,
            batches,
            steps=steps,
            schedule=settings.make_schedule(lr, steps),
            validate=HeldOutLoss(subject.model, checks) if checks else None,
            validate_every=settings.validate_every or every,
            checkpoints=folder,
            checkpoint_every=settings.checkpoint_every or every,
            callbacks=[*log, *_early(settings), *callbacks],
            control=control,
        )
        if resume:
            if output is None:
                raise UsageError("say which run to go on with: its folder")
            found = latest_checkpoint(output, self._run, say)
            if found is None:
                raise UsageError(f"{output}: holds no checkpoint to go on from")
            subject.load(found.weights)
            if found.optimizer is not None:
                groups = [{"params": [p.name for p in g.parameters], **g.options} for g in optimizer.groups]
                from_section(optimizer, found.optimizer, groups)
            self.trainer.restore(found.snapshot)
            say(f"going on from step {self.trainer.state.step} ({found.path.name})")

    def fit(self) -> Summary:
        """Train; what was best is in the run's folder afterwards.

        Raises:
            OazooError: see :meth:`oazoo.training.loop.Trainer.fit`.
        """
        summary = self.trainer.fit()
        if self.output is not None:
            if self.trainer.validate is None:
                # Without validation the last step is the best there is.
                assert self.trainer.checkpoints is not None
                self.trainer.checkpoints.save(self.trainer, best=True)
            if self.subject.adapters is not None:
                self._write_adapter(self.output)
            if summary.steps and find_spec("matplotlib") is not None:
                draw_curves(self.output / LOG, self.output / CURVES, overwrite=True)
        return summary

    def _write_adapter(self, output: Path) -> None:
        """The best corrections, or the last ones without validation, as PEFT reads them."""
        subject = self.subject
        assert subject.adapters is not None and subject.lora is not None
        best = output / "best.oam"
        if best.exists():
            with OamSource(best) as source:
                subject.load({name: np.array(tensor.numpy()) for name, tensor in source.items()})
        if subject.map is None:
            return
        lora = subject.lora
        pairs = {
            layer: LoraPair(adapter.a.values(), adapter.b.values(), lora.alpha, lora.rank_stabilised)
            for layer, adapter in subject.adapters.items()
        }
        published = to_published(pairs, subject.map)
        adapter = Adapter(published, subject.map.fan_in_fan_out, subject.base or {}, lora.dropout)
        write_adapter(output / "adapter", adapter, linear_modules=subject.map.modules, overwrite=True)


#: Settings of a run that may differ when it goes on.
_MAY_CHANGE = ("validate_every", "checkpoint_every", "patience")


def _parts(
    documents: Documents, settings: TrainSettings, others: Documents | None
) -> tuple[Part, Part | None]:
    """What is learned from, and what is validated on."""
    if others is not None:
        return everything(documents), everything(others)
    if not settings.validation:
        return everything(documents), None
    return split(documents, settings.validation, settings.seed)


def _early(settings: TrainSettings) -> list[Callback]:
    return [] if settings.patience is None else [EarlyStopping(settings.patience)]


def _memory(subject: _Subject, settings: TrainSettings, context: int) -> int:
    """About how many bytes of device memory a run takes: weights, gradients, moments, and what a step keeps.

    What a step keeps follows from the shapes: for each token and layer the inputs of every product and norm, the scores'
    sums, and once the logits and their gradient.
    """
    config = subject.config
    stored = sum(shard.nbytes for p in subject.model.parameters() for shard in p.shards)
    learned = 4 * sum(tensor.numel for _, tensor in subject.learning())
    tokens = settings.batch_size * context
    hidden = config.hidden_size
    inner = int(getattr(config, "intermediate_size", 4 * hidden))
    kept = config.num_layers * (10 * hidden + 4 * inner) + 3 * config.vocab_size
    return stored + 3 * learned + 4 * tokens * kept


def train(
    preset_name: str,
    data: Sequence[Path],
    output: Path | None,
    settings: TrainSettings | None = None,
    *,
    device: Device | None = None,
    **options: Any,
) -> Run:
    """A run that trains a preset's model from nothing; see :class:`Run` for the options. ``.fit()`` begins it."""
    chosen = settings or TrainSettings()
    chosen = replace(chosen, context=chosen.context or preset(preset_name).context)
    return Run(new_model(preset_name, chosen, data, device or get_device()), data, chosen, output, **options)


def finetune(
    model: TextModel | str | Path,
    data: Sequence[Path],
    output: Path | None,
    settings: TrainSettings | None = None,
    *,
    lora: LoraSettings | None = None,
    targets: Sequence[str] = (),
    device: Device | None = None,
    **options: Any,
) -> Run:
    """A run that trains a model further: corrections beside it with ``lora``, else all its weights.

    Args:
        model: a loaded model, or what :func:`oazoo.load` takes.
        data, output, options: see :class:`Run`.
        settings: how.
        lora: of the corrections; ``targets`` name the layers that get one (all linear ones but the head by default).
        device: where to load a model given by name.
    """
    from oazoo.zoo.load import load

    loaded = (
        model
        if isinstance(model, TextModel)
        else load(model, device=device, progress=options.get("progress"), notify=options.get("notify"))
    )
    chosen = settings or TrainSettings()
    return Run(imported_model(loaded, chosen, lora, targets), data, chosen, output, **options)
