"""Training: optimizers, clipping, schedules, the loop, and what is kept of a run."""

from __future__ import annotations

from oazoo.training.clip import clip_grad_norm
from oazoo.training.optimizer import Optimizer
from oazoo.training.optimizers import SGD, Adam, AdamW, Muon, NoOp
from oazoo.training.step import TrainingStep

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Muon",
    "NoOp",
    "Optimizer",
    "TrainingStep",
    "clip_grad_norm",
]
