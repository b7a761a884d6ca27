"""Translation of checkpoints: the transfer engine, and one declarative map an architecture."""

from __future__ import annotations

from oazoo.translators.convert import ConversionReport, TensorReport, convert
from oazoo.translators.plan import Plan, plan
from oazoo.translators.translator import Checkpoint, Translation, Translator, supported, translators

__all__ = [
    "Checkpoint",
    "ConversionReport",
    "Plan",
    "TensorReport",
    "Translation",
    "Translator",
    "convert",
    "plan",
    "supported",
    "translators",
]
