"""Makes schedules.json: learning rates of PyTorch's schedulers, for tests/training/test_schedules.py.

    python make_schedules.py     (needs torch; made with 2.13)
"""

import json
import warnings
from pathlib import Path

import torch
from torch.optim import lr_scheduler as s

warnings.simplefilter("ignore")
STEPS = 30


def rates(lr, build, steps=STEPS):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr)
    scheduler = build(optimizer)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def plateau(metrics, **options):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
    scheduler = s.ReduceLROnPlateau(optimizer, **options)
    found = []
    for metric in metrics:
        scheduler.step(metric)
        found.append(optimizer.param_groups[0]["lr"])
    return found


METRICS = [3.0, 2.0, 1.5, 1.49999, 1.4999, 1.5, 1.6, 1.4, 1.4, 1.4, 1.4, 1.4, 1.3, 1.3, float("nan"), 1.3, 1.31, 1.2]
cases = {
    "one_cycle": rates(0.1, lambda o: s.OneCycleLR(o, 0.1, total_steps=STEPS, cycle_momentum=False)),
    "one_cycle_long": rates(
        0.1,
        lambda o: s.OneCycleLR(
            o, 0.1, total_steps=STEPS, pct_start=0.5, div_factor=10, final_div_factor=100, cycle_momentum=False
        ),
    ),
    "cosine": rates(0.1, lambda o: s.CosineAnnealingLR(o, 40, 0.01)),
    "cosine_restarts": rates(0.1, lambda o: s.CosineAnnealingWarmRestarts(o, 4, 2, 0.01)),
    "cyclic_triangular": rates(0.01, lambda o: s.CyclicLR(o, 0.01, 0.1, 4, cycle_momentum=False)),
    "cyclic_triangular2": rates(0.01, lambda o: s.CyclicLR(o, 0.01, 0.1, 4, mode="triangular2", cycle_momentum=False)),
    "cyclic_exp_range": rates(
        0.01, lambda o: s.CyclicLR(o, 0.01, 0.1, 4, mode="exp_range", gamma=0.9, cycle_momentum=False)
    ),
    "warmup": rates(0.1, lambda o: s.LinearLR(o, 1 / 6, 1.0, 5)),
    "warmup_cosine": rates(
        0.1,
        lambda o: s.SequentialLR(o, [s.LinearLR(o, 1 / 5, 1.0, 4), s.CosineAnnealingLR(o, 30, 0.01)], [5]),
    ),
    "plateau_metrics": [m if m == m else None for m in METRICS],
    "plateau_min": plateau(METRICS, factor=0.5, patience=2, threshold=1e-2, min_lr=0.02),
    "plateau_max": plateau([10 - m for m in METRICS], mode="max", factor=0.5, patience=1, threshold=1e-2),
    "plateau_absolute": plateau(METRICS, factor=0.5, patience=2, threshold=0.05, threshold_mode="abs"),
}
Path(__file__).with_name("schedules.json").write_text(json.dumps(cases, indent=1) + "\n")
