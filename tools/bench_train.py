"""`make bench-train`: how long a step of training takes, ours captured beside PyTorch's on the processor, paired.

    python tools/bench_train.py [--torch PYTHON] [--rounds 7] [--profile] [tiny|gpt|moe …]

Two models: `tiny`, OA's byte Transformer (25,760 parameters, 64 sequences of 16), and `gpt` (3.3 million, 16 of 128). And
`moe`, OA's byte Transformer with experts (4 of width 16, 2 a token) beside that without, as modules, without PyTorch. Two
take turns, a few steps each, so that whatever else a machine does falls on both; told are the medians and the best of all
steps. `--torch` names a Python that has PyTorch; without one, ours is measured alone. OA 0.8.6 takes 150 ms for a step of
`tiny` on the software device of the machine on which PyTorch takes 4 ms.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from op_transformer import Sizes, Transformer

from oazoo.configs import TransformerConfig
from oazoo.models.transformer import Transformer as Model
from oazoo.runtime import get_device
from oazoo.training import AdamW, TrainingStep
from oazoo.training.language import summed_loss

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


class Ours:
    """The captured step."""

    def __init__(self, case: Case) -> None:
        self.model = Transformer.random(case.sizes, case.batch)
        self.step = TrainingStep(self.model.loss, AdamW(self.model.tensors, 1e-3), kept=4096)
        rng = np.random.default_rng(0)
        count = case.batch * case.sizes.context
        self.batch = [rng.integers(0, case.sizes.vocabulary, count).astype(np.int32) for _ in range(2)]
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
        optimizer = AdamW(self.model.tensors, 1e-3)
        step = TrainingStep(self.model.loss, optimizer, captured=False)
        for _ in range(2):
            with get_device().profile() as found:
                step(*self.batch)
        for name, times in sorted(found.items(), key=lambda item: -sum(item[1])):
            print(f"    {name:32} {len(times):4} {1e3 * sum(times):10.2f} ms")
        print(
            f"    {'together':32} {sum(map(len, found.values())):4} {1e3 * sum(map(sum, found.values())):10.2f} ms"
        )


class Modules:
    """The captured step of a model of OA's, as `oazoo train` runs it."""

    def __init__(self, config: TransformerConfig, rows: int = 64) -> None:
        self.model = Model(config, get_device())
        self.model.initialize(get_device(), 0).train()
        self.step = self._new(captured=True)
        rng = np.random.default_rng(0)
        shape = rows, config.max_positions
        tokens = [rng.integers(0, config.vocab_size, shape).astype(np.int32) for _ in range(2)]
        self.batch = [*tokens, np.full(shape, 1 / tokens[0].size, np.float32)]
        self.times(1)

    def _new(self, *, captured: bool) -> TrainingStep:
        loss = partial(summed_loss, self.model)
        return TrainingStep(loss, AdamW(self.model.named_parameters(), 1e-3), captured=captured, kept=4096)

    times = Ours.times

    def profile(self) -> None:
        """What each kernel takes when it runs alone, of one eager step: the least of five."""
        step, best = self._new(captured=False), dict[str, tuple[float, int]]()
        for _ in range(5):
            with get_device().profile() as found:
                step(*self.batch)
            for name, times in found.items():
                best[name] = min(best.get(name, (1e9, 0)), (sum(times), len(times)))
        for name, (seconds, count) in sorted(best.items(), key=lambda item: -item[1][0]):
            print(f"    {name:32} {count:4} {1e3 * seconds:10.2f} ms")


def mixture(rounds: int, profiled: bool) -> None:
    """A step with experts beside one without, in turns."""
    dense = Modules(TransformerConfig.byte_transformer())
    sparse = Modules(TransformerConfig.byte_moe_transformer())
    print("moe: 64 × 16; at most 1.3 times the step without experts")
    print(f"  {sparse.step.commands} commands, without experts {dense.step.commands}")
    found: dict[str, list[float]] = {"experts": [], "without": []}
    ratios = []
    for _ in range(rounds):
        one, other = sparse.times(20), dense.times(20)
        found["experts"] += one
        found["without"] += other
        ratios.append(min(one) / min(other))
    for name, times in found.items():
        print(f"  {told(name, times)}")
    print(f"  {statistics.median(ratios):.2f} times as long")
    if profiled:
        sparse.profile()


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "models", nargs="*", choices=[[], *CASES, "moe"], help="which models; tiny and gpt if none is named"
    )
    parser.add_argument("--torch", help="a Python that has PyTorch")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--profile", action="store_true", help="also what each kernel takes")
    options = parser.parse_args()
    print(f"on {get_device().info.name}")
    for name in options.models or CASES:
        if name == "moe":
            mixture(options.rounds, options.profile)
            continue
        case = CASES[name]
        ours = Ours(case)
        parameters = sum(t.numel for t in ours.model.tensors)
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


if __name__ == "__main__":
    main()
