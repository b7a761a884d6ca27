"""The settings of a training run: checked once, kept in its checkpoints, turned into optimizer and schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

from oazoo.errors import UsageError
from oazoo.runtime import Tensor
from oazoo.training import SGD, Adam, AdamW, Muon, Optimizer
from oazoo.training.examples import Special
from oazoo.training.optimizer import Compat
from oazoo.training.schedules import Constant, OneCycle, ReduceOnPlateau, Schedule, WarmupCosine

OPTIMIZERS = ("adamw", "adam", "muon", "sgd")
SCHEDULES = ("cosine", "constant", "one-cycle", "plateau")
DTYPES = ("f32", "bf16", "f16")
#: Learning rates to begin with.
_RATES = {"adamw": 3e-3, "adam": 3e-3, "muon": 2e-2, "sgd": 1e-1}
_ADAPTER_RATES = {"adamw": 1e-3, "adam": 1e-3, "muon": 5e-3, "sgd": 1e-1}
_FULL_RATES = {"adamw": 5e-5, "adam": 5e-5, "muon": 5e-4, "sgd": 1e-2}
#: Rows of a step: their ids are held by the host at once.
_MAX_ROWS = 1 << 20


def _is_matrix(name: str, tensor: Tensor) -> bool:
    """Whether a parameter multiplies: not a vector, nor a bias or a scale for each head of Mamba-3, whatever their shape."""
    last = name.rpartition(".")[2]
    return (
        len(tensor.shape) > 1 and not last.endswith(("_bias", "norm_weight")) and not last.startswith("mimo_")
    )


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """How a run is made.

    Attributes:
        steps: of the optimizer; None for as many as ``epochs`` take.
        epochs: passes over the data.
        minutes: the run ends earlier when it has taken so long; the schedule follows the time then. None for no limit.
        batch_size: rows of a batch; ``accumulate`` batches make a step.
        auto_batch: divide a step of ``batch_size · accumulate`` rows into batches as large as free memory allows.
        checkpointing: keep nothing inside layers on the way forward and compute it again: less memory, a third more time.
        context: tokens of a row; None for the model's own, 512 at most.
        optimizer: one of ``OPTIMIZERS``.
        compat: ``"oa"`` for OA's definition of the optimizer, one group for all parameters, and to go on with the state that
            the model's file has of it; None for the papers'.
        lr: highest learning rate; None for one that suits optimizer and kind of run.
        schedule: one of ``SCHEDULES``.
        warmup: share of the steps on the way up.
        min_lr: the rate at the end, as a share of ``lr``.
        weight_decay: of matrices; vectors have none.
        clip: largest norm of the gradient; 0 for none.
        dropout: share of activations that are dropped.
        dtype: how matrices that learn are stored; ``f16`` and ``bf16`` are updated in f32.
        validation: share of the data held back; 0 for none.
        validate_every, checkpoint_every: steps; None for about ten times in a run.
        patience: validations without improvement before the run ends; None for no such end.
        seed: of first values, order of the data and dropout.
        special: what names of control tokens in the data are; see :data:`oazoo.training.examples.Special`.
    """

    steps: int | None = None
    epochs: float = 1.0
    minutes: float | None = None
    batch_size: int = 16
    accumulate: int = 1
    auto_batch: bool = False
    checkpointing: bool = False
    context: int | None = None
    optimizer: str = "adamw"
    compat: Compat = None
    lr: float | None = None
    schedule: str = "cosine"
    warmup: float = 0.05
    min_lr: float = 0.1
    weight_decay: float = 0.1
    clip: float = 1.0
    dropout: float = 0.0
    dtype: str = "f32"
    validation: float = 0.05
    validate_every: int | None = None
    checkpoint_every: int | None = None
    patience: int | None = None
    seed: int = 0
    special: Special = "refuse"

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "accumulate", "context", "validate_every", "checkpoint_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} must be 1 or more, not {value}")
        if self.batch_size * self.accumulate > _MAX_ROWS:
            raise UsageError(
                f"a step over {self.batch_size:,} times {self.accumulate:,} rows cannot be meant; {_MAX_ROWS:,} are the most"
            )
        for name, low, high in (
            ("warmup", 0.0, 0.9),
            ("min_lr", 0.0, 1.0),
            ("dropout", 0.0, 0.95),
            ("validation", 0.0, 0.9),
            ("weight_decay", 0.0, 10.0),
            ("clip", 0.0, 1e9),
            ("epochs", 1e-6, 1e6),
        ):
            if not low <= getattr(self, name) <= high:
                raise UsageError(f"{name} must be from {low:g} to {high:g}, not {getattr(self, name)}")
        if self.minutes is not None and not 0 < self.minutes <= 1e6:
            raise UsageError(f"a run cannot take {self.minutes} minutes")
        if self.lr is not None and not 0 < self.lr < 1e3:
            raise UsageError(f"a learning rate of {self.lr} cannot be meant")
        if self.optimizer not in OPTIMIZERS:
            raise UsageError(f"unknown optimizer {self.optimizer!r}; there are {', '.join(OPTIMIZERS)}")
        if self.compat not in (None, "oa"):
            raise UsageError(f"compat is 'oa' or None, not {self.compat!r}")
        if self.dtype not in DTYPES:
            raise UsageError(f"matrices cannot be stored as {self.dtype!r}; there are {', '.join(DTYPES)}")
        if self.special not in get_args(Special):
            raise UsageError(f"unknown way {self.special!r}; there are {', '.join(get_args(Special))}")
        if self.schedule not in SCHEDULES:
            raise UsageError(f"unknown schedule {self.schedule!r}; there are {', '.join(SCHEDULES)}")
        if self.patience is not None and self.patience < 0:
            raise UsageError(f"patience must be 0 or more, not {self.patience}")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"a seed is from 0 to 2^63 - 1, not {self.seed}")
        if not self.validation and (self.patience is not None or self.schedule == "plateau"):
            raise UsageError(
                "early stopping and the plateau schedule need validation data: --validation above 0"
            )

    def rate(self, kind: str) -> float:
        """The highest learning rate: from nothing (``new``), of all weights (``full``), or of adapters (``lora``)."""
        if self.lr is not None:
            return self.lr
        rates = {"new": _RATES, "full": _FULL_RATES, "lora": _ADAPTER_RATES}[kind]
        return rates[self.optimizer]

    def make_optimizer(self, parameters: Sequence[tuple[str, Tensor]], lr: float) -> Optimizer:
        """The optimizer, with weight decay on matrices only, and only those made orthogonal by Muon."""
        matrices = [(name, tensor) for name, tensor in parameters if _is_matrix(name, tensor)]
        others = [(name, tensor) for name, tensor in parameters if not _is_matrix(name, tensor)]
        apart: dict[str, Any] = {"params": others, "weight_decay": 0.0}
        if self.optimizer == "muon" and any(len(tensor.shape) == 2 for _, tensor in others):
            apart["matrices"] = False
        groups: list[dict[str, Any]] = [{"params": matrices}, apart]
        groups = [group for group in groups if group["params"]]
        if self.compat == "oa":
            groups = [{"params": list(parameters)}]
        compat = self.compat
        momentum = 0.0 if compat == "oa" else 0.9  # OA keeps no momentum of SGD in its files
        if self.optimizer == "adamw":
            return AdamW(groups, lr, betas=(0.9, 0.99), weight_decay=self.weight_decay, compat=compat)
        if self.optimizer == "adam":
            return Adam(groups, lr, betas=(0.9, 0.99), weight_decay=self.weight_decay, compat=compat)
        if self.optimizer == "muon":
            return Muon(groups, lr, weight_decay=self.weight_decay, compat=compat)
        return SGD(groups, lr, momentum=momentum, weight_decay=self.weight_decay, compat=compat)

    def make_schedule(self, lr: float, steps: int) -> Schedule:
        """The learning rate by step."""
        if self.schedule == "constant":
            return Constant(lr)
        if self.schedule == "plateau":
            return ReduceOnPlateau(lr, factor=0.5, patience=2, min_lr=lr * self.min_lr)
        if self.schedule == "one-cycle":
            return OneCycle(lr, max(steps, 2))
        return WarmupCosine(lr, min(round(steps * self.warmup), steps - 1), steps, lr * self.min_lr)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)
