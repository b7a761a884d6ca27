"""ONNX graphs, run by the evaluator that the onnx package itself defines operators with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from oazoo.translators.reference.description import NoReferenceError
from oazoo.translators.reference.maths import Array

#: The evaluator holds the model several times over.
MAX_BYTES = 4 << 30
_MASKS, _PLACES = ("attention_mask",), ("position_ids",)


def onnx_logits(path: Path, files: Sequence[Path], sequences: Sequence[npt.NDArray[np.int64]]) -> list[Array]:
    """Logits after every token, float32 [tokens, vocabulary] for each sequence.

    Raises:
        NoReferenceError: the model is too large for the evaluator, has inputs that are not known, or operators that the
            evaluator lacks.
    """
    size = sum(file.stat().st_size for file in files)
    if size > MAX_BYTES:
        raise NoReferenceError(
            f"{size:,} bytes are too many for onnx's own evaluator, which holds all in memory"
        )
    import onnx
    from onnx.reference import ReferenceEvaluator

    model = onnx.load(str(path))
    stored = {value.name for value in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in stored]
    try:
        evaluator = ReferenceEvaluator(model)
    # What onnx raises for operators that it lacks has no class of its own in all its versions.
    except Exception as error:
        raise NoReferenceError(f"onnx's evaluator does not take the graph: {str(error)[:200]}") from error
    length = _fixed_length(inputs)
    results = []
    for ids in sequences:
        if length is not None and length != len(ids):
            # Attention is causal: what follows a token does not change its logits.
            padded = np.concatenate([ids, np.zeros(max(0, length - len(ids)), np.int64)])[:length]
        else:
            padded = ids
        feeds = {value.name: _feed(value, padded) for value in inputs}
        try:
            with np.errstate(all="ignore"):
                outputs = evaluator.run(None, feeds)
        except Exception as error:
            raise NoReferenceError(f"onnx's evaluator fails on the graph: {str(error)[:200]}") from error
        logits = next((out for out in outputs if out.ndim == 3 and out.shape[:2] == (1, len(padded))), None)
        if logits is None:
            raise NoReferenceError("the graph has no output of the shape [1, tokens, vocabulary]")
        results.append(logits[0, : len(ids)].astype(np.float32))
    return results


def fixed_length(path: Path) -> int | None:
    """The number of tokens that a graph was exported for, if it takes no other."""
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    stored = {value.name for value in model.graph.initializer}
    return _fixed_length([value for value in model.graph.input if value.name not in stored])


def _fixed_length(inputs: Sequence[Any]) -> int | None:
    for value in inputs:
        dims = value.type.tensor_type.shape.dim
        if len(dims) == 2 and dims[1].HasField("dim_value") and dims[1].dim_value > 0:
            return int(dims[1].dim_value)
    return None


def _feed(value: Any, ids: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    from onnx import TensorProto

    kind, dims = value.type.tensor_type.elem_type, value.type.tensor_type.shape.dim
    if kind not in (TensorProto.INT64, TensorProto.INT32) or len(dims) != 2:
        raise NoReferenceError(f"the graph's input {value.name[:64]!r} is not known to the check")
    if value.name in _MASKS:
        filled = np.ones_like(ids)
    elif value.name in _PLACES:
        filled = np.arange(len(ids), dtype=np.int64)
    else:
        filled = ids
    return filled[None].astype(np.int64 if kind == TensorProto.INT64 else np.int32)
