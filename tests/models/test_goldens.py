"""Golden checkpoints on the device: logits of transformers and llama.cpp's formats, every kernel variant, every encoding."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_goldens import GGUF, HF, ONNX, reference
from reference_models import load_oam
from reference_models import logits as numpy_logits

import oazoo

#: What the issue of a golden allows: encodings that become f16 in conversion, and bf16, lose more.
TOLERANCE = {"llama_tied_bf16": 2e-2, "BF16": 2e-2, "Q4_K_M": 2e-2, "Q6_K": 2e-2}
Converted = Callable[[str], Path]


@pytest.mark.parametrize("name", [*HF, *GGUF, *ONNX])
def test_logits_of_the_reference(name: str, converted: Converted) -> None:
    ids, wanted = reference(name)
    model = oazoo.load(converted(name))
    got = model.logits(ids)
    assert got.shape == wanted.shape and got.dtype == np.float32
    assert np.abs(got - wanted).max() <= TOLERANCE.get(name, 1e-3)


@pytest.mark.parametrize("name", [*HF, *GGUF, *ONNX])
def test_logits_of_the_same_file_in_float64(name: str, converted: Converted) -> None:
    """Apart from rounding in the conversion, the device must agree with float64 on the very weights it has."""
    ids, _ = reference(name)
    params, config = load_oam(converted(name))
    row = ids if ids.ndim == 1 else ids[-1]
    wanted = numpy_logits(params, config, row)
    got = oazoo.load(converted(name)).logits(row)
    assert np.abs(got - wanted).max() <= 5e-5


@pytest.mark.parametrize("to", ["q8", "q4"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2", "gemma3", "gpt_neox", "F32"])
def test_packed_models(name: str, to: str, converted: Converted, tmp_path: Path) -> None:
    """Width 48 and 64 × 96 rows: blocks of 32 that run across rows, in every product, the embedding and the head."""
    ids, _ = reference(name)
    path = tmp_path / "packed.oam"
    oazoo.quantize(converted(name), path, to, method="absmax")
    params, config = load_oam(path)
    row = ids if ids.ndim == 1 else ids[0]
    got = oazoo.load(path).logits(row)
    assert np.abs(got - numpy_logits(params, config, row)).max() <= 5e-5


def in_a_process(path: Path, ids: list[int], **environment: str) -> np.ndarray[Any, Any]:
    """Logits from a process of its own, with other settings of the runtime."""
    code = (
        "import json, sys, numpy as np, oazoo\n"
        "path, ids, out = json.loads(sys.argv[1])\n"
        "np.save(out, oazoo.load(path).logits(np.array(ids)))\n"
    )
    out = path.with_suffix(".npy")
    argument = json.dumps([str(path), ids, str(out)])
    subprocess.run([sys.executable, "-c", code, argument], env={**os.environ, **environment}, check=True)
    result: np.ndarray[Any, Any] = np.load(out)
    return result


@pytest.mark.parametrize(
    "environment",
    [
        {"OAZOO_PORTABLE_KERNELS": "1"},
        {"OAZOO_STAGING": "1"},
        {"OAZOO_MAX_BUFFER_BYTES": "20000"},
    ],
    ids=lambda e: next(iter(e)),
)
@pytest.mark.parametrize("name", ["gpt2", "qwen2", "gemma2"])
def test_no_setting_changes_the_answer(
    name: str, environment: dict[str, str], converted: Converted, tmp_path: Path
) -> None:
    """The kernels for GPUs, memory the host cannot see, and weights split over many small buffers."""
    ids = [int(i) for i in reference(name)[0][0]]
    dense = converted(name)
    packed = tmp_path / "packed.oam"
    oazoo.quantize(dense, packed, "q8", method="absmax")
    for path in (dense, packed):
        wanted = oazoo.load(path).logits(np.array(ids))
        got = in_a_process(path, ids, **environment)
        if "OAZOO_PORTABLE_KERNELS" in environment:
            assert np.abs(got - wanted).max() <= 2e-5
        else:
            assert np.array_equal(got, wanted)
