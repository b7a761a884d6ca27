"""Adding an architecture adds one file; and every map can be run backwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from checkpoints import GPT2, gpt2_tensors, write_hf
from model_goldens import HF

import oazoo.translators as package
from oazoo.formats.detect import open_source
from oazoo.translators import convert, plan, supported, translators
from oazoo.translators.rules import invert, run

DATA = Path(__file__).resolve().parent.parent / "data"

NEW = '''
"""A made-up architecture: GPT-2 under another name."""
from oazoo.translators.gpt2 import TRANSLATORS as _GPT2
from oazoo.translators.translator import Translator
TRANSLATORS = (Translator("made_up", "Made up", ("hf:MadeUpForCausalLM",), _GPT2[0].translate),)
'''


@pytest.fixture
def one_more_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "made_up_architecture.py").write_text(NEW)
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    translators.cache_clear()
    yield
    translators.cache_clear()


@pytest.mark.usefixtures("one_more_file")
def test_a_new_file_is_a_new_architecture(tmp_path: Path) -> None:
    assert "made_up: hf:MadeUpForCausalLM" in supported()
    folder = write_hf(tmp_path / "hf", GPT2 | {"architectures": ["MadeUpForCausalLM"]}, gpt2_tensors(GPT2))
    assert convert(folder, tmp_path / "m.oam").translator == "made_up"


@pytest.mark.parametrize(
    "path",
    [DATA / "hf" / name for name in HF] + [DATA / "gguf" / f"tiny-{kind}.gguf" for kind in ("F32", "BF16")],
    ids=lambda path: path.name,
)
def test_maps_run_backwards_to_the_source(path: Path, tmp_path: Path) -> None:
    convert(path, tmp_path / "m.oam")
    with plan(path) as planned, open_source(tmp_path / "m.oam") as converted:
        source = planned.checkpoint.source
        targets = {name: tensor.numpy() for name, tensor in converted.items()}
        rebuilt = run(invert(planned.translation.rules), targets)
        assert set(rebuilt) == set(source)
        for name, value in rebuilt.items():
            assert np.ascontiguousarray(value).tobytes() == source[name].raw().tobytes(), name
