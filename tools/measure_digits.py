"""Measure a flow model of scikit-learn's digits: are its samples the digits they are to be, and are they copies?

    python tools/measure_digits.py MODEL [--guidance G] [--steps N] [--count N] [-o figures.json]

A support vector machine that learned the real training images says which digits the samples are. The distance of a sample
to the nearest training image (Euclidean, pixels from 0 to 1) stands beside that of real images the model has not seen:
copies would be much nearer. Needs scikit-learn. ``DATA_SEED`` and ``HELD_BACK`` say which images training did not see.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import oazoo
from oazoo.training.flow_data import digits

#: Which images the recipe holds back.
DATA_SEED, HELD_BACK = 1, 0.15
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
Rows = npt.NDArray[np.float32]


def nearest(rows: Rows, training: Rows) -> Rows:
    """The distance of each row to the nearest training row (Euclidean)."""
    squares = (rows**2).sum(1)[:, None] - 2 * rows @ training.T + (training**2).sum(1)[None]
    return np.sqrt(np.maximum(squares, 0).min(1))


def measure(
    model: str, *, guidance: float = 2.0, steps: int = 20, count: int = 1000, seed: int = 11
) -> dict[str, Any]:
    """The figures of a model."""
    from sklearn.svm import SVC

    data = digits()
    part, held = data.split(HELD_BACK, DATA_SEED)
    assert held is not None and part.labels is not None and held.labels is not None
    training, real = part.values.reshape(part.count, -1) / 16, held.values.reshape(held.count, -1) / 16
    classifier = SVC(C=10.0, gamma=0.1).fit(training, part.labels)
    loaded = oazoo.load_flow(model)
    loaded.sample(count=min(count, 64), steps=1, guidance=guidance)  # compiles what is needed
    start = time.perf_counter()
    loaded.sample(count=100, steps=20, guidance=guidance, seed=seed)
    hundred = time.perf_counter() - start
    start = time.perf_counter()
    loaded.sample(count=100, steps=20, seed=seed)
    hundred_plain = time.perf_counter() - start
    found = loaded.sample(count=count, steps=steps, guidance=guidance, seed=seed)
    assert found.classes is not None
    samples = found.values.reshape(count, -1) / 16
    told = classifier.predict(samples)
    right = told == found.classes
    quantiles = {
        name: dict(
            zip(map(str, QUANTILES), np.round(np.quantile(nearest(rows, training), QUANTILES), 3).tolist())
        )
        for name, rows in (("samples", samples), ("real images not trained on", real))
    }
    within = [samples[found.classes == number] for number in range(10)]
    real_within = [real[held.labels == number] for number in range(10)]
    return {
        "guidance": guidance,
        "steps": steps,
        "samples": count,
        "recognised": float(right.mean()),
        "recognised_by_class": {str(n): float(right[found.classes == n].mean()) for n in range(10)},
        "classifier_on_real_images": float(classifier.score(real, held.labels)),
        "nearest_training_image": quantiles,
        "spread_within_a_class": float(np.mean([rows.std(0).mean() for rows in within])),
        "spread_within_a_class_of_real_images": float(np.mean([rows.std(0).mean() for rows in real_within])),
        "seconds_100_samples_20_steps": hundred,
        "seconds_100_samples_20_steps_without_guidance": hundred_plain,
    }


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--guidance", type=float, default=2.0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    figures = measure(
        arguments.model, guidance=arguments.guidance, steps=arguments.steps, count=arguments.count
    )
    text = json.dumps(figures, indent=2)
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
