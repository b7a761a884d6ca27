"""Train a model of the zoo again, by its recipe: train, pack, measure on text it has not seen, and sample.

    python tools/zoo_text.py build/text
    python tools/train_zoo.py NAME build/text build/NAME

The last folder gets the run, ``NAME.oam`` (Q8), and ``figures.json`` with what the card says. The same packages, device and
recipe give the same file; other devices round differently.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import oazoo
from oazoo.cli.common import progress_bar, say
from oazoo.training.callbacks import ProgressReport
from oazoo.zoo.train_settings import TrainSettings

#: Preset, settings, and how samples begin.
RECIPES: dict[str, tuple[str, TrainSettings]] = {
    "bytelm-kjv": (
        "bytelm-small",
        TrainSettings(steps=450, batch_size=16, context=256, optimizer="muon", validation=0.02, seed=1),
    ),
    "nanogpt-kjv": (
        "nanogpt-small",
        TrainSettings(steps=300, batch_size=16, context=128, optimizer="muon", validation=0.02, seed=1),
    ),
}
PROMPTS = ("In the beginning", "And the king said unto", "Blessed are")


def main(arguments: list[str]) -> int:
    """Command line."""
    if len(arguments) != 3 or arguments[0] not in RECIPES:
        print(f"{__doc__}\nThere are {', '.join(RECIPES)}.", file=sys.stderr)
        return 2
    name, text, out = arguments[0], Path(arguments[1]), Path(arguments[2])
    preset, settings = RECIPES[name]
    start = time.perf_counter()
    resume = any(out.glob("run/checkpoint-*.oam"))
    out.mkdir(parents=True, exist_ok=True)
    with progress_bar() as progress:
        run = oazoo.train(
            preset,
            [text / "train.txt"],
            out / "run",
            settings,
            callbacks=[ProgressReport(progress)],
            resume=resume,
            notify=say,
        )
        summary = run.fit()
    trained = time.perf_counter() - start
    dense, packed = out / "run" / "best.oam", out / f"{name}.oam"
    report = oazoo.quantize(dense, packed, "q8", method="search", overwrite=True)
    test = (text / "test.txt").read_text("utf-8")
    measured = oazoo.evaluate(packed, test, against=dense, context=settings.context or 128)
    model = oazoo.load(packed)
    samples = [
        model.generate(prompt, raw=True, max_tokens=100, temperature=0.7, top_p=0.95, seed=7).text
        for prompt in PROMPTS
    ]
    figures: dict[str, Any] = {
        "name": name,
        "preset": preset,
        "settings": settings.to_json(),
        "plan": run.plan.to_json(),
        "summary": summary.to_json(),
        "seconds": trained,
        "bytes": report.output_bytes,
        "held_out": measured.to_json(),
        "samples": dict(zip(PROMPTS, samples, strict=True)),
    }
    (out / "figures.json").write_text(json.dumps(figures, indent=2, ensure_ascii=False) + "\n", "utf-8")
    print(json.dumps(figures["held_out"], indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
