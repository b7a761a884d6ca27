"""The examples in Python of the document on training run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).resolve().parent.parent.parent / "docs" / "training.md"


def test_its_examples_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "book.txt").write_text("In the beginning was the word, and the word was short. " * 60)
    monkeypatch.chdir(tmp_path)
    said = []
    for block in re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text("utf-8"), re.M | re.S):
        exec(compile(block, str(DOCUMENT), "exec"), {})
        said.append(capsys.readouterr().out.split())
    (memory, first, last, _), (entropy,), (loss,) = said
    assert int(memory) > 1 << 20 and float(last) < float(first)
    assert 0 <= float(loss) < 1e-3 and 0 < float(entropy) <= 1
    assert (tmp_path / "run" / "best.oam").is_file()
