"""The stress test of the largest buffer: it passes here, and it would tell where a buffer loses what is written."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from oazoo.runtime import get_device
from oazoo.runtime.stress import Stress, compare, run_stress, stress

MIB = 1 << 20


def test_the_largest_buffer_of_this_device_holds() -> None:
    outcome = run_stress()
    assert outcome.passed, outcome
    limit = get_device().allocator.max_buffer_bytes
    assert limit // 4 <= outcome.nbytes <= limit  # halved when memory is short
    assert outcome.offsets[:2] == [0, 256 * MIB]
    assert outcome.offsets[-1] == outcome.nbytes - 256
    assert outcome.good_bytes == outcome.nbytes


def test_a_limited_buffer_is_marked_at_every_spacing() -> None:
    code = (
        "import json\nfrom dataclasses import asdict\nfrom oazoo.runtime.stress import stress\n"
        "print(json.dumps(asdict(stress(spacing=65536))))"
    )
    env = {**os.environ, "OAZOO_MAX_BUFFER_BYTES": str(MIB)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    outcome = Stress(**json.loads(done.stdout))
    assert outcome.passed and outcome.nbytes == MIB
    assert outcome.offsets == [*range(0, MIB, 65536), MIB - 256]


def test_too_little_memory_is_told() -> None:
    command = [sys.executable, "-m", "oazoo.runtime.stress"]
    env = {**os.environ, "OAZOO_MEMORY_LIMIT": str(64 * MIB)}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 1
    outcome = Stress(**json.loads(done.stdout))
    assert not outcome.passed
    assert outcome.problem is not None and "OAZOO_MEMORY_LIMIT" in outcome.problem


@pytest.mark.parametrize(
    ("damage", "wrong"),
    [
        ({}, []),
        ({2: 0.0}, [512]),  # zeros past a point
        ({0: 4.0}, [0]),  # wrapped around: a later mark in the place of an earlier one
        ({1: float("nan"), 3: 0.0}, [256, 768]),
    ],
)
def test_marks_that_changed_are_found(damage: dict[int, float], wrong: list[int]) -> None:
    seen = np.repeat(np.arange(1, 5, dtype=np.float32)[:, None], 64, axis=1)
    for row, value in damage.items():
        seen[row, 63] = value
    assert compare([0, 1, 2, 3], seen) == wrong


def test_a_spacing_as_large_as_the_buffer_marks_both_ends() -> None:
    outcome = stress(spacing=get_device().allocator.max_buffer_bytes)
    assert outcome.passed
    assert outcome.offsets == [0, outcome.nbytes - 256]
