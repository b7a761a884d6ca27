"""What a checkpoint itself means: forward passes in NumPy that read the source under its own names and settings.

This is what ``oazoo convert --check`` measures a conversion against. So that a wrong map shows, nothing here knows the
maps of :mod:`oazoo.translators`, our names of weights or our typed configs: an architecture is described a second time, from
the settings that its own programs read, and a graph of ONNX is run by onnx's own evaluator. ``.importlinter`` keeps it so.

Weights are read a few rows at a time and let go, so memory does not grow with the model (but for ONNX graphs).
"""

from __future__ import annotations

from oazoo.translators.reference.choose import Reference, reference_for
from oazoo.translators.reference.description import NoReferenceError

__all__ = ["NoReferenceError", "Reference", "reference_for"]
