"""Training: optimizers, clipping, schedules, the loop, and what is kept of a run."""

from __future__ import annotations

from oazoo.training.clip import clip_grad_norm
from oazoo.training.optimizer import Optimizer
from oazoo.training.optimizers import SGD, Adam, AdamW, Muon, NoOp

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Muon",
    "NoOp",
    "Optimizer",
    "clip_grad_norm",
]
