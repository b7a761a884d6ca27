"""``train`` and ``finetune``: from a preset or a model and text to a run's folder with its best model.

A run's folder holds ``best.oam`` (lowest validation loss, or the last step without validation), resumable checkpoints,
``log.csv``, ``curves.png`` where matplotlib is installed, and after LoRA ``adapter/`` in PEFT's layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from oazoo.errors import DeviceError, UsageError
from oazoo.formats.lora import LoraPair
from oazoo.formats.oam import OamSource
from oazoo.generation.text_model import TextModel
from oazoo.runtime import Device, OutOfDeviceMemoryError, get_device
from oazoo.training.batches import Batch, Batches, one_pass
from oazoo.training.callbacks import Callback, EarlyStopping
from oazoo.training.checkpoints import BEST, RunFolder, checkpoints, latest_checkpoint
from oazoo.training.control import TrainingControl
from oazoo.training.csv_log import CsvLog
from oazoo.training.data import Part, everything, load_data, split
from oazoo.training.documents import Documents
from oazoo.training.language import HeldOutLoss, LanguageStepper
from oazoo.training.loop import Trainer
from oazoo.training.lora import LoraSettings
from oazoo.training.rows import make_rows
from oazoo.training.section import from_section, to_section
from oazoo.zoo.adapters import write_mapped
from oazoo.zoo.evaluate import loaded_model
from oazoo.zoo.presets import preset
from oazoo.zoo.progress import Progress
from oazoo.zoo.train_folder import LOG, MAY_CHANGE, FolderRun, check_folder
from oazoo.zoo.train_memory import RunMemory, divide, refusal
from oazoo.zoo.train_settings import TrainSettings
from oazoo.zoo.train_subject import Subject, imported_model, new_model

#: Longest rows unless longer ones are asked for: attention's cost grows with their square.
_CONTEXT = 512
_VALIDATION_TOKENS = 1 << 15
Notify = Callable[[str], None]


@dataclass(frozen=True)
class TrainPlan:
    """What a run will do, before it does it; ``memory`` in bytes of device memory, ``memory_bytes`` all of it."""

    model: str
    parameters: int
    trained: int
    rows: int
    tokens_per_epoch: int
    validation_tokens: int
    context: int
    steps: int
    lr: float
    batch_size: int
    accumulate: int
    memory_bytes: int
    memory: RunMemory
    device: str

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self)


class Run(FolderRun):
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
        subject: Subject,
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
        if output is not None:
            check_folder(output, resume)
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
        held_rows = None if held is None else make_rows(held, context, seed=settings.seed)

        def checks(size: int) -> list[Batch]:
            most = max(1, _VALIDATION_TOKENS // (context * size))
            return [] if held_rows is None else list(one_pass(held_rows, size, limit=most))

        model, learning = subject.model, subject.learning()
        model.checkpointing = settings.checkpointing
        lr = settings.rate(subject.kind)
        begun = subject.optimizer if subject.kind == "full" else None
        if begun is not None and settings.lr is None:
            lr = begun.lr
        optimizer = settings.make_optimizer(learning, lr)
        if begun is not None:
            from_section(optimizer, begun)
            say(f"going on with the state of {begun.kind} after {begun.step} steps that {subject.name} has")

        def stepper(accumulate: int) -> LanguageStepper:
            return LanguageStepper(
                model, optimizer, clip=settings.clip or None, accumulate=accumulate, seed=settings.seed
            )

        def measure(size: int, accumulate: int) -> tuple[int, int]:
            step = stepper(accumulate).measure(size, context)
            return step, HeldOutLoss.measure(model, size, context) if held_rows is not None else 0

        free = model.device.allocator.free_bytes
        size, accumulate = settings.batch_size, settings.accumulate
        if settings.auto_batch:
            size, accumulate = divide(size * accumulate, free, measure)
        try:
            step_bytes, validation_bytes = measure(size, accumulate)
        except DeviceError as error:
            raise DeviceError(
                f"a step over {size} rows of {context} tokens: {error}; use smaller batches or shorter rows "
                "(--batch-size, --auto-batch, --context)"
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
                refusal(memory, model.device, size, context, checkpointing=settings.checkpointing)
            )
        batches = Batches(rows, documents, size, accumulate=accumulate, seed=settings.seed)
        steps = settings.steps or max(1, math.ceil(settings.epochs * batches.steps_per_epoch))
        validation = checks(size)
        self.plan = TrainPlan(
            model=subject.name,
            parameters=sum(math.prod(p.shape) for p in model.parameters()),
            trained=sum(tensor.numel for _, tensor in learning),
            rows=rows.count,
            tokens_per_epoch=rows.report.targets,
            validation_tokens=sum(batch.tokens for batch in validation),
            context=context,
            steps=steps,
            lr=lr,
            batch_size=size,
            accumulate=accumulate,
            memory_bytes=memory.total,
            memory=memory,
            device=model.device.info.name,
        )
        # How long the run is may change when it goes on; everything else decides what its next step is.
        same = {k: v for k, v in settings.to_json().items() if k not in MAY_CHANGE}
        same["rows_of_a_step"] = size * accumulate
        self._run = {**subject.identity, "data": batches.digest, "settings": same}
        folder, log = None, list[Callback]()
        if output is not None:
            # What a run that never came to its first checkpoint has logged is not gone on from.
            log = [CsvLog(output / LOG, resumed=True)]
            self._from = max(checkpoints(output), default=None)
            folder = RunFolder(
                output,
                model=subject.file,
                weights=lambda: subject.weights() | optimizer.masters(),
                encodings=subject.encodings(),
                optimizer=lambda: to_section(optimizer),
                run=self._run,
            )
        self._folder = folder
        every = max(1, steps // 10)
        self.trainer = Trainer(
            stepper(accumulate),
            batches,
            steps=steps,
            schedule=settings.make_schedule(lr, steps),
            validate=HeldOutLoss(model, validation) if validation else None,
            validate_every=settings.validate_every or every,
            checkpoints=folder,
            checkpoint_every=settings.checkpoint_every or every,
            callbacks=[*log, *_early(settings), *callbacks],
            control=control,
            limit=None if settings.minutes is None else 60 * settings.minutes,
        )
        if resume:
            if output is None:
                raise UsageError("say which run to go on with: its folder")
            found = latest_checkpoint(output, self._run, say)
            if found is None:
                raise UsageError(f"{output}: holds no checkpoint to go on from")
            subject.load(found.weights)
            optimizer.load_masters(found.weights)
            if found.optimizer is not None:
                groups = [{"params": [p.name for p in g.parameters], **g.options} for g in optimizer.groups]
                from_section(optimizer, found.optimizer, groups)
            self.trainer.restore(found.snapshot)
            say(f"going on from step {self.trainer.state.step} ({found.path.name})")

    def _finish(self, output: Path) -> None:
        if self.subject.adapters is not None:
            self._write_adapter(output)

    def _write_adapter(self, output: Path) -> None:
        """The best corrections, or the last ones without validation, as PEFT reads them."""
        subject = self.subject
        assert subject.adapters is not None and subject.lora is not None
        best = output / BEST
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
        write_mapped(pairs, subject.map, output / "adapter", subject.base or {}, lora.dropout, overwrite=True)


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
    loaded = loaded_model(model, device, options.get("progress"), options.get("notify"))
    chosen = settings or TrainSettings()
    return Run(imported_model(loaded, chosen, lora, targets), data, chosen, output, **options)
