"""`make bench-train`: how long a step of training takes, ours captured beside PyTorch's on the processor, paired.

    python tools/bench_train.py [--torch PYTHON] [--rounds 7] [--profile] [tiny|gpt|presets|oa-bytegru …]

Two models: `tiny`, OA's byte Transformer (25,760 parameters, 64 sequences of 16), and `gpt` (3.3 million, 16 of 128). Both
take turns, a few steps each, so that whatever else a machine does falls on both; told are the medians and the best of all
steps. `--torch` names a Python that has PyTorch; without one, ours is measured alone. OA 0.8.6 takes 150 ms for a step of
`tiny` on the software device of the machine on which PyTorch takes 4 ms.

`presets` are all of OA's models over bytes, by turns with each other, 64 sequences of 16: the whole step of a training,
and how it compares with the Transformer's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from op_transformer import Sizes, Transformer

from oazoo.models import build
from oazoo.runtime import Tensor, get_device
from oazoo.training import AdamW, TrainingStep
from oazoo.training.language import summed_loss
from oazoo.zoo.presets import OA_CONTEXT, PRESETS

TORCH = """
import sys, time, torch, torch.nn as nn, torch.nn.functional as F
v, t, w, f, layers, heads, batch = map(int, sys.argv[1:8])
torch.set_num_threads(2)
class Block(nn.Module):
    def __init__(s):
        super().__init__()
        s.n1, s.n2 = nn.LayerNorm(w), nn.LayerNorm(w)
        s.q, s.k, s.v, s.o = (nn.Linear(w, w) for _ in range(4))
        s.up, s.down = nn.Linear(w, f), nn.Linear(f, w)
    def forward(s, x):
        h = s.n1(x)
        q, k, u = (p(h).view(batch, t, heads, -1).transpose(1, 2) for p in (s.q, s.k, s.v))
        a = F.scaled_dot_product_attention(q, k, u, is_causal=True).transpose(1, 2).reshape(batch, t, w)
        x = x + s.o(a)
        return x + s.down(F.gelu(s.up(s.n2(x)), approximate="tanh"))
class Model(nn.Module):
    def __init__(s):
        super().__init__()
        s.tokens, s.places = nn.Embedding(v, w), nn.Embedding(t, w)
        s.blocks = nn.ModuleList(Block() for _ in range(layers))
        s.norm, s.head = nn.LayerNorm(w), nn.Linear(w, v)
    def forward(s, x):
        y = s.tokens(x) + s.places.weight
        for b in s.blocks:
            y = b(y)
        return s.head(s.norm(y))
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
x, y = torch.randint(0, v, (batch, t)), torch.randint(0, v, (batch * t,))
for line in sys.stdin:
    for _ in range(int(line)):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).view(batch * t, v), y)
        loss.backward()
        optimizer.step()
        loss.item()
        print(time.perf_counter() - start)
    print(flush=True)
"""


@dataclass(frozen=True)
class Case:
    sizes: Sizes
    batch: int
    steps: int
    limit: str


CASES = {
    "tiny": Case(Sizes(256, 16, 32, 64, 1, 1), 64, 20, "at most 15 ms where PyTorch takes 4"),
    "gpt": Case(Sizes(256, 128, 256, 1024, 4, 4), 16, 2, "at most 4 times PyTorch's"),
}


#: What a step of OA's models took in OA 0.8.6 on the software device, and may take here.
LIMITS = {
    "oa-bytetransformer": "OA took 150 ms",
    "oa-bytegru": "OA took 144 ms; at most 20",
    "oa-bytemamba3": "OA took 267 ms; at most 30",
    "oa-bytemoetransformer": "at most 1.3 times the Transformer's",
}
BESIDE = "oa-bytetransformer"
PRESET_NAMES = sorted(name for name in PRESETS if name.startswith("oa-byte"))


class Captured:
    """The captured step over one batch."""

    loss: Callable[..., Tensor]
    tensors: Any
    batch: list[np.ndarray[Any, Any]]

    def begin(self) -> None:
        """Capture it."""
        self.step = TrainingStep(self.loss, AdamW(self.tensors, 1e-3), kept=4096)
        self.step(*self.batch)
        self.step.losses()

    def times(self, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            start = time.perf_counter()
            self.step(*self.batch)
            self.step.losses()
            found.append(time.perf_counter() - start)
        return found

    def profile(self) -> None:
        """What each kernel takes when it runs alone, of one eager step."""
        step = TrainingStep(self.loss, AdamW(self.tensors, 1e-3), captured=False)
        for _ in range(2):
            with get_device().profile() as found:
                step(*self.batch)
        for name, times in sorted(found.items(), key=lambda item: -sum(item[1])):
            print(f"    {name:32} {len(times):4} {1e3 * sum(times):10.2f} ms")
        print(
            f"    {'together':32} {sum(map(len, found.values())):4} {1e3 * sum(map(sum, found.values())):10.2f} ms"
        )


class Ours(Captured):
    """A Transformer of ops alone."""

    def __init__(self, case: Case) -> None:
        model = Transformer.random(case.sizes, case.batch)
        self.loss, self.tensors = model.loss, model.tensors
        rng = np.random.default_rng(0)
        count = case.batch * case.sizes.context
        self.batch = [rng.integers(0, case.sizes.vocabulary, count).astype(np.int32) for _ in range(2)]
        self.begin()


class OfPreset(Captured):
    """A model of OA's over bytes, as it is trained."""

    def __init__(self, name: str) -> None:
        device = get_device()
        model = build(PRESETS[name].config(256, OA_CONTEXT), device)
        model.initialize(device)
        model.train()
        self.loss = partial(summed_loss, model)
        self.tensors = [(own, parameter.tensor) for own, parameter in model.named_parameters()]
        shape = (64, OA_CONTEXT)
        ids = np.random.default_rng(0).integers(0, 256, (2, *shape)).astype(np.int32)
        self.batch = [ids[0], ids[1], np.full(shape, 1 / ids[0].size, np.float32)]
        self.begin()


class Torch:
    """PyTorch's step, in a process of its own that waits between turns."""

    def __init__(self, python: str, case: Case) -> None:
        s = case.sizes
        sizes = [s.vocabulary, s.context, s.width, s.hidden, s.layers, s.heads, case.batch]
        # Threads that wait by spinning would take the processor from the other side's turn.
        environment = dict(os.environ, OMP_WAIT_POLICY="passive", GOMP_SPINCOUNT="0")
        self.process = subprocess.Popen(
            [python, "-c", TORCH, *map(str, sizes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.times(1)

    def times(self, steps: int) -> list[float]:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(steps, file=self.process.stdin, flush=True)
        found = []
        while line := self.process.stdout.readline().strip():
            found.append(float(line))
        if len(found) != steps:
            sys.exit("bench-train: the process with PyTorch ended; is torch installed there?")
        return found

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def told(name: str, times: list[float]) -> str:
    return f"{name} {1e3 * statistics.median(times):9.1f} ms (best {1e3 * min(times):.1f})"


def compare(names: list[str], rounds: int, profile: bool) -> None:
    """OA's models by turns."""
    cases = {name: OfPreset(name) for name in dict.fromkeys([BESIDE, *names])}
    times: dict[str, list[list[float]]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            times[name].append(case.times(10))
    for name, case in cases.items():
        ratio = statistics.median(min(a) / min(b) for a, b in zip(times[name], times[BESIDE], strict=True))
        found = told("", [one for some in times[name] for one in some])
        print(
            f"{name}: {case.step.commands} commands,{found}; {ratio:.2f} times {BESIDE}. {LIMITS.get(name, '')}"
        )
        if profile:
            case.profile()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "models",
        nargs="*",
        choices=[[], *CASES, "presets", *PRESET_NAMES],
        help="which models; all if none is named",
    )
    parser.add_argument("--torch", help="a Python that has PyTorch")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--profile", action="store_true", help="also what each kernel takes")
    options = parser.parse_args()
    print(f"on {get_device().info.name}")
    chosen = options.models or [*CASES, "presets"]
    presets = PRESET_NAMES if "presets" in chosen else [name for name in chosen if name in PRESETS]
    for name in chosen:
        if name not in CASES:
            continue
        case = CASES[name]
        ours = Ours(case)
        parameters = sum(t.numel for t in ours.tensors)
        print(f"{name}: {parameters:,} parameters, {case.batch} × {case.sizes.context}; {case.limit}")
        print(f"  {ours.step.commands} commands, {ours.step.nbytes / 1e6:.1f} MB of intermediates")
        other = Torch(options.torch, case) if options.torch else None
        mine: list[float] = []
        theirs: list[float] = []
        ratios: list[float] = []
        for _ in range(options.rounds):
            mine += (some := ours.times(case.steps))
            if other is not None:
                theirs += (their := other.times(case.steps))
                ratios.append(min(some) / min(their))
        print(f"  {told('ours', mine)}")
        if other is not None:
            other.close()
            print(f"  {told('PyTorch', theirs)}; ours takes {statistics.median(ratios):.2f} times as long")
        if options.profile:
            ours.profile()
    if presets:
        compare(presets, options.rounds, options.profile)


if __name__ == "__main__":
    main()
