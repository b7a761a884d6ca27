"""Training of flow models: from a preset or a loaded model and images or sequences to a run's folder with its best model.

The folder is that of any run (:mod:`oazoo.zoo.train`), with pictures of samples beside: ``samples-NNNNNNNN.png`` at every
validation, ``.npy`` for sequences.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from oazoo import __version__
from oazoo.configs import FlowConfig
from oazoo.errors import DeviceError, UsageError
from oazoo.formats.atomic import write_atomically
from oazoo.formats.oam import OamSource
from oazoo.formats.oam_layout import OamConfig
from oazoo.generation.flow_model import FlowModel
from oazoo.models.flow import FlowDenoiser
from oazoo.models.flow_tokens import to_tokens
from oazoo.runtime import Device, OutOfDeviceMemoryError, Tensor, get_device
from oazoo.training.callbacks import Callback, EarlyStopping
from oazoo.training.checkpoints import ModelFile, RunFolder, checkpoints, latest_checkpoint
from oazoo.training.control import TrainingControl
from oazoo.training.csv_log import CsvLog
from oazoo.training.flow import FlowStepper, HeldOutFlowLoss
from oazoo.training.flow_data import (
    FlowBatch,
    FlowBatches,
    FlowData,
    FlowItems,
    digits,
    load_flow_data,
    one_flow_pass,
)
from oazoo.training.loop import Trainer
from oazoo.training.records import ValidationRecord
from oazoo.training.section import from_section, to_section
from oazoo.zoo.files import open_file
from oazoo.zoo.flow_presets import flow_preset
from oazoo.zoo.flow_samples import picture_of
from oazoo.zoo.train import TrainPlan
from oazoo.zoo.train_folder import LOG, MAY_CHANGE, FolderRun, check_folder
from oazoo.zoo.train_memory import RunMemory, divide, refusal
from oazoo.zoo.train_settings import TrainSettings

Notify = Callable[[str], None]
#: Items that are validated on at most, and how often each, with other noise.
_VALIDATED, _ROUNDS = 512, 4
#: Samples of a picture, and the guidance they are drawn with where there are classes.
_SHOWN, _GUIDANCE = 100, 2.0
#: Weight of the loss that keeps experts equally busy.
_BALANCE = 0.01
#: Share of conditions that are not told while training, unless another is asked for.
CONDITION_DROPOUT = 0.1


@dataclass
class FlowSubject:
    """What is trained: the network, and what its files say."""

    name: str
    kind: str
    model: FlowDenoiser
    file: ModelFile
    identity: dict[str, Any]

    @property
    def config(self) -> FlowConfig:
        """Its configuration."""
        return self.model.config

    def learning(self) -> list[tuple[str, Tensor]]:
        """Names and tensors of the parameters that learn, in the order of files."""
        found = [(name, parameter.tensor) for name, parameter in self.model.named_parameters()]
        return [(name, tensor) for name, tensor in found if tensor.requires_grad]

    def weights(self) -> dict[str, npt.NDArray[np.float32]]:
        """Their values."""
        return {name: parameter.values() for name, parameter in self.model.named_parameters()}


def _file(config: FlowConfig, document: Mapping[str, Any]) -> ModelFile:
    return ModelFile(
        OamConfig(
            architecture=config.family,
            d_model=config.hidden_size,
            n_layers=config.num_layers,
            weight_dtype="f32",
            payload=json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode(),
        )
    )


def _new(name: str, data: FlowData, seed: int, device: Device) -> FlowSubject:
    """A preset's model for the data, with first values."""
    config = flow_preset(name).config(data)
    model = FlowDenoiser(config, device)
    model.initialize(device, seed)
    model.freeze_positions()
    document = {
        "oazoo": 1,
        "family": config.family,
        "model": config.to_json(),
        "source": {"format": "trained", "name": name, "architecture": []},
        "tool": f"oazoo {__version__}",
    }
    return FlowSubject(
        name, "new", model, _file(config, document), {"model": name, "config": config.to_json()}
    )


def _imported(loaded: FlowModel) -> FlowSubject:
    """A loaded model, its weights unpacked to f32, made ready to learn."""
    path = Path(str(loaded.info["path"]))
    with open_file(path) as source:
        assert isinstance(source, OamSource)
        document = {k: v for k, v in source.metadata.items() if k not in ("receipt", "quantization")}
        facts = source.metadata.get("receipt")
    loaded.model.to_f32().requires_grad_()
    loaded.model.freeze_positions()
    config = loaded.config
    identity = {"model": loaded.name, "receipt": facts, "config": config.to_json()}
    return FlowSubject(loaded.name, "full", loaded.model, _file(config, document), identity)


class Pictures(Callback):
    """Writes samples into the run's folder at every validation, always from the same noise.

    Args:
        model: what is trained.
        folder: of the run.
        seed: of the noise.
    """

    def __init__(self, model: FlowModel, folder: Path, seed: int) -> None:
        self._model, self._folder, self._seed = model, folder, seed

    def on_validation(self, trainer: Trainer, record: ValidationRecord) -> None:
        conditioned = self._model.config.num_classes > 0
        if self._model.config.condition_features:
            return  # nobody says which conditions
        found = self._model.sample(count=_SHOWN, seed=self._seed, guidance=_GUIDANCE if conditioned else 1.0)
        suffix, content = picture_of(found, self._model.config)
        path = self._folder / f"samples-{record.step:08d}{suffix}"
        write_atomically(path, content, overwrite=True)


class FlowRun(FolderRun):
    """A training run of a flow model that is ready to begin or to go on; see :class:`oazoo.zoo.train.Run`.

    Args:
        subject: what is trained.
        data: images or sequences.
        settings: how.
        output: the run's folder; None only to plan.
        resume: go on from the newest checkpoint in it.
        condition_dropout: share of conditions that are not told.
        validation: data to validate on, in place of a part of ``data``.
        callbacks, control, notify: as those of any run.
    """

    def __init__(
        self,
        subject: FlowSubject,
        data: FlowData,
        settings: TrainSettings,
        output: Path | None,
        *,
        resume: bool = False,
        condition_dropout: float = CONDITION_DROPOUT,
        validation: FlowData | None = None,
        callbacks: Sequence[Callback] = (),
        control: TrainingControl | None = None,
        progress: object = None,
        notify: Notify | None = None,
    ) -> None:
        say = notify or (lambda line: None)
        self.subject, self.output = subject, output
        if output is not None:
            check_folder(output, resume)
        _check_settings(settings, condition_dropout)
        model, config = subject.model, subject.config
        _check_data(data, config, subject.name)
        part, held = data, validation
        if held is not None:
            _check_data(held, config, subject.name)
        else:
            part, held = data.split(settings.validation, settings.seed)
        items = FlowItems(part, to_tokens(config, rescaled(part, config)))
        held_items = None if held is None else FlowItems(held, to_tokens(config, rescaled(held, config)))
        for mixture in model.mixtures():
            mixture.balance = 0.0 if settings.checkpointing else _BALANCE
        model.checkpointing, model.condition_dropout = settings.checkpointing, condition_dropout
        lr = settings.rate(subject.kind)
        optimizer = settings.make_optimizer(subject.learning(), lr)

        def stepper(accumulate: int) -> FlowStepper:
            return FlowStepper(
                model, optimizer, clip=settings.clip or None, accumulate=accumulate, seed=settings.seed
            )

        def checks(size: int) -> list[FlowBatch]:
            if held_items is None:
                return []
            return list(one_flow_pass(held_items, min(size, _VALIDATED), max(1, _VALIDATED // size)))

        def measure(size: int, accumulate: int) -> tuple[int, int]:
            batch = items.batch(np.arange(size, dtype=np.int64) % part.count)
            held_batches = checks(size)[:1]
            validated = HeldOutFlowLoss.measure(model, held_batches[0]) if held_batches else 0
            return stepper(accumulate).measure(batch), validated

        free = model.device.allocator.free_bytes
        size, accumulate = settings.batch_size, settings.accumulate
        if settings.auto_batch:
            size, accumulate = divide(size * accumulate, free, measure)
        try:
            step_bytes, validation_bytes = measure(size, accumulate)
        except DeviceError as error:
            raise DeviceError(
                f"a step over {size} items: {error}; use smaller batches (--batch-size, --auto-batch)"
            ) from error
        memory = RunMemory(
            weights=sum(shard.nbytes for p in model.parameters() for shard in p.shards),
            optimizer=optimizer.nbytes,
            step=step_bytes,
            validation=validation_bytes,
            free=free,
        )
        if not memory.fits and output is not None:
            raise OutOfDeviceMemoryError(
                refusal(memory, model.device, size, config.tokens, checkpointing=settings.checkpointing)
            )
        batches = FlowBatches(items, size, accumulate=accumulate, seed=settings.seed)
        steps = settings.steps or max(1, math.ceil(settings.epochs * batches.steps_per_epoch))
        validated = checks(size)
        self.plan = TrainPlan(
            model=subject.name,
            parameters=sum(math.prod(p.shape) for p in model.parameters()),
            trained=sum(tensor.numel for _, tensor in subject.learning()),
            rows=part.count,
            tokens_per_epoch=part.count * config.tokens if part.mask is None else int(part.mask.sum()),
            validation_tokens=sum(batch.tokens for batch in validated),
            context=config.tokens,
            steps=steps,
            lr=lr,
            batch_size=size,
            accumulate=accumulate,
            memory_bytes=memory.total,
            memory=memory,
            device=model.device.info.name,
        )
        same = {k: v for k, v in settings.to_json().items() if k not in MAY_CHANGE}
        same |= {"rows_of_a_step": size * accumulate, "condition_dropout": condition_dropout}
        run = {**subject.identity, "data": batches.digest, "settings": same}
        folder, own = None, list[Callback]()
        if output is not None:
            own = [CsvLog(output / LOG, resumed=True), Pictures(FlowModel(model), output, settings.seed)]
            self._from = max(checkpoints(output), default=None)
            folder = RunFolder(
                output,
                model=subject.file,
                weights=subject.weights,
                optimizer=lambda: to_section(optimizer),
                run=run,
            )
        self._folder = folder
        if settings.patience is not None:
            own.append(EarlyStopping(settings.patience))
        every = max(1, steps // 10)
        self.trainer = Trainer(
            stepper(accumulate),
            batches,
            steps=steps,
            schedule=settings.make_schedule(lr, steps),
            validate=HeldOutFlowLoss(model, validated, rounds=_ROUNDS) if validated else None,
            validate_every=settings.validate_every or every,
            checkpoints=folder,
            checkpoint_every=settings.checkpoint_every or every,
            callbacks=[*own, *callbacks],
            control=control,
            limit=None if settings.minutes is None else 60 * settings.minutes,
        )
        if resume:
            if output is None:
                raise UsageError("say which run to go on with: its folder")
            found = latest_checkpoint(output, run, say)
            if found is None:
                raise UsageError(f"{output}: holds no checkpoint to go on from")
            model.load_state_dict(found.weights)
            if found.optimizer is not None:
                groups = [{"params": [p.name for p in g.parameters], **g.options} for g in optimizer.groups]
                from_section(optimizer, found.optimizer, groups)
            self.trainer.restore(found.snapshot)
            say(f"going on from step {self.trainer.state.step} ({found.path.name})")


def rescaled(data: FlowData, config: FlowConfig) -> npt.NDArray[np.float32]:
    """Values in the units of a model: images from the range of the data to that of the model; sequences as they are."""
    if not data.is_image or not config.clip:
        return data.values
    assert data.low is not None and data.high is not None
    low, high = config.data_offset[0] - config.data_scale[0], config.data_offset[0] + config.data_scale[0]
    share = (data.values - np.float32(data.low)) / np.float32(data.high - data.low)
    return np.asarray(low + share * (high - low), np.float32)


def _check_settings(settings: TrainSettings, condition_dropout: float) -> None:
    if not 0 <= condition_dropout < 1:
        raise UsageError(f"condition_dropout must be from 0 to less than 1, not {condition_dropout}")
    if settings.dropout:
        raise UsageError("flow models have no dropout; leave --dropout out (conditions: --condition-dropout)")
    if settings.context is not None:
        raise UsageError("flow models have no context to choose; leave --context out")
    if settings.dtype != "f32":
        raise UsageError("flow models learn as f32; leave --dtype out")


def _check_data(data: FlowData, config: FlowConfig, name: str) -> None:
    """Refuse data that a model cannot learn from."""
    if config.prediction not in ("velocity", "sit_velocity"):
        raise UsageError(f"{name} predicts {config.prediction}: only models with a velocity are trained")
    if data.is_image != config.is_image:
        raise UsageError(f"{data.where}: {name} learns {'images' if config.is_image else 'sequences'}")
    wanted = (
        (config.image_height, config.image_width, config.image_channels)
        if config.is_image
        else (config.tokens, config.token_size)
    )
    if data.values.shape[1:] != wanted:
        raise UsageError(
            f"{data.where}: items of {list(data.values.shape[1:])}; those of {name} are {list(wanted)}"
        )
    if bool(config.num_classes) != (data.labels is not None):
        raise UsageError(f"{data.where}: {name} needs {'labels' if config.num_classes else 'no labels'}")
    if data.labels is not None and int(data.labels.max()) >= config.num_classes:
        raise UsageError(
            f"{data.where}: has the class {int(data.labels.max())}; {name} knows 0 to {config.num_classes - 1}"
        )
    features = 0 if data.conditions is None else data.conditions.shape[1]
    if features != config.condition_features:
        raise UsageError(
            f"{data.where}: {features} features of a condition; {name} takes {config.condition_features}"
        )


def _data(files: Sequence[Path], own_digits: bool, classes: Sequence[int]) -> FlowData:
    if files:
        data = load_flow_data(files)
    elif own_digits:
        data = digits()
    else:
        raise UsageError("say what to learn from: --data with .npy or .npz files")
    return data.of_classes(classes) if classes else data


def train_flow(
    preset_name: str,
    data: Sequence[Path] = (),
    output: Path | None = None,
    settings: TrainSettings | None = None,
    *,
    classes: Sequence[int] = (),
    validation_data: Sequence[Path] = (),
    device: Device | None = None,
    **options: Any,
) -> FlowRun:
    """A run that trains a preset's flow model from nothing; ``.fit()`` begins it.

    Args:
        preset_name: of :data:`oazoo.zoo.flow_presets.FLOW_PRESETS`.
        data: ``.npy`` and ``.npz`` files, see :func:`oazoo.training.flow_data.load_flow_data`; none for scikit-learn's
            digits, where the preset learns them.
        output: the run's folder.
        settings: how; the preset's own if None.
        classes: learn only these.
        validation_data: files to validate on, in place of a part of the data.
        device: where.
        options: see :class:`FlowRun`.
    """
    chosen = flow_preset(preset_name)
    found = _data(data, chosen.digits, classes)
    held = _data(validation_data, False, classes) if validation_data else None
    used = settings or TrainSettings(**chosen.settings)
    subject = _new(preset_name, found, used.seed, device or get_device())
    return FlowRun(subject, found, used, output, validation=held, **options)


def finetune_flow(
    model: FlowModel | str | Path,
    data: Sequence[Path] = (),
    output: Path | None = None,
    settings: TrainSettings | None = None,
    *,
    classes: Sequence[int] = (),
    validation_data: Sequence[Path] = (),
    device: Device | None = None,
    **options: Any,
) -> FlowRun:
    """A run that trains all weights of a flow model further, unpacked to f32; arguments as those of :func:`train_flow`.

    Without ``data``, a model of the digits (8 × 8 pixels, ten classes) learns scikit-learn's.
    """
    from oazoo.zoo.load import load_flow

    loaded = model if isinstance(model, FlowModel) else load_flow(model, device=device)
    config = loaded.config
    same = (config.image_height, config.image_width, config.image_channels, config.num_classes) == (
        8,
        8,
        1,
        10,
    )
    found = _data(data, same, classes)
    held = _data(validation_data, False, classes) if validation_data else None
    used = settings or TrainSettings()
    return FlowRun(_imported(loaded), found, used, output, validation=held, **options)


__all__ = ["FlowRun", "finetune_flow", "train_flow"]
