"""SmolLM2's tokenizer and chat template, as they come out of its GGUF file, against the reference ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oazoo.generation import TextModel
from oazoo.text import Tokenizer
from oazoo.translators.plan import plan
from oazoo.zoo.pull import pull

pytestmark = pytest.mark.network
REFERENCE = Path(__file__).parent.parent / "data" / "smollm2" / "reference.npz"


@pytest.fixture(scope="module")
def smollm2(transformer_of: Any) -> TextModel:
    with plan(pull("smollm2-135m-instruct").path) as planned:
        assets = planned.assets
        carried = {name.removeprefix("asset/"): data for name, data in assets.files().items()}
        return TextModel.from_assets(transformer_of(49152), carried, assets.generation, assets.tokens)


@pytest.fixture(scope="module")
def reference() -> tuple[list[dict[str, str]], Any]:
    arrays = np.load(REFERENCE)
    return json.loads(str(arrays["meta"])), arrays


def test_ids_of_every_reference_prompt(smollm2: TextModel, reference: Any) -> None:
    meta, arrays = reference
    for number, entry in enumerate(meta):
        assert smollm2.encode_text(entry["prompt"]) == arrays[f"ids_{number}"].tolist()


def test_texts_of_every_reference_answer(smollm2: TextModel, reference: Any) -> None:
    meta, arrays = reference
    for number, entry in enumerate(meta):
        ids = arrays[f"greedy_{number}"].tolist()
        prompt = arrays[f"ids_{number}"].tolist()
        assert smollm2.tokenizer.decode(ids, skip_special=False, after=prompt) == entry["greedy_text"]
        decoder = smollm2.tokenizer.stream(skip_special=False, after=prompt)
        assert "".join(map(decoder.push, ids)) + decoder.flush() == entry["greedy_text"]


def test_the_chat_template_gives_the_reference_prompt(smollm2: TextModel, reference: Any) -> None:
    meta, arrays = reference
    ids, continues = smollm2.prompt_ids("What is the capital of France?")
    assert ids == arrays["ids_2"].tolist() and not continues
    assert smollm2.tokenizer.decode(ids, skip_special=False) == meta[2]["prompt"]
    assert isinstance(smollm2.tokenizer, Tokenizer) and 2 in smollm2.eos_ids
