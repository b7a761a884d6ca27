"""Train the zoo's flow-digits again, by its recipe: train, pack, measure, and draw a grid of samples.

    python tools/train_digits.py build/flow-digits

The folder gets the run, ``flow-digits.oam`` (Q8), ``flow-digits.png``, and ``figures.json`` with what the card says. A run
that was begun is gone on with. Needs scikit-learn. The same packages, device and recipe give the same file; other devices
round differently.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from measure_digits import DATA_SEED, HELD_BACK, measure

import oazoo
from oazoo.cli.common import progress_bar, say
from oazoo.training.callbacks import ProgressReport
from oazoo.zoo.flow_samples import file_of
from oazoo.zoo.train_flow import train_flow
from oazoo.zoo.train_settings import TrainSettings

RECIPE = TrainSettings(
    steps=3500,
    batch_size=64,
    optimizer="adamw",
    lr=1.5e-3,
    warmup=0.05,
    min_lr=0.02,
    weight_decay=0.01,
    validation=HELD_BACK,
    seed=DATA_SEED,
)
GUIDANCE = 2.0


def main(arguments: list[str]) -> int:
    """Command line."""
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    out = Path(arguments[0])
    out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    resume = any(out.glob("run/checkpoint-*.oam"))
    with progress_bar() as progress:
        run = train_flow(
            "flow-digits",
            (),
            out / "run",
            RECIPE,
            callbacks=[ProgressReport(progress)],
            resume=resume,
            notify=say,
        )
        summary = run.fit()
    trained = time.perf_counter() - start
    packed = out / "flow-digits.oam"
    report = oazoo.quantize(out / "run" / "best.oam", packed, "q8", method="search", overwrite=True)
    model = oazoo.load_flow(packed)
    found = model.sample(count=100, steps=20, guidance=GUIDANCE, seed=1)
    (out / "flow-digits.png").write_bytes(file_of(found, model.config, ".png", columns=10))
    figures = {
        "settings": RECIPE.to_json(),
        "plan": run.plan.to_json(),
        "summary": summary.to_json(),
        "seconds": trained,
        "bytes": report.output_bytes,
        "measured": measure(str(packed), guidance=GUIDANCE),
        "measured_without_guidance": measure(str(packed), guidance=1.0),
        "measured_dense": measure(str(out / "run" / "best.oam"), guidance=GUIDANCE),
    }
    (out / "figures.json").write_text(json.dumps(figures, indent=2) + "\n", "utf-8")
    print(json.dumps(figures["measured"], indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
