"""Parameters stored as f16 and bf16: rounding against NumPy's, updates against the same in float64 with an f32 copy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from oazoo.errors import DeviceError, UsageError
from oazoo.nn import Embedding, LayerNorm, Linear, Sequential
from oazoo.runtime import Tensor, get_device
from oazoo.runtime.ops.elementwise import narrow
from oazoo.runtime.ops.pack import pack
from oazoo.training import SGD, AdamW, Muon, Optimizer, TrainingStep
from oazoo.training.losses import cross_entropy, mse

TYPES: dict[str, Any] = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}
F64 = npt.NDArray[np.float64]


def on_device(array: npt.ArrayLike) -> Tensor:
    return Tensor.from_numpy(get_device(), array)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.filterwarnings("ignore:.* encountered in cast")
def test_rounding(dtype: str) -> None:
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 2**32, 20_001, np.uint64).astype(np.uint32)
    # Ties and their neighbours, numbers below the smallest, the largest, infinities and NaN.
    ties = np.arange(2**10, dtype=np.uint32) << 12 | 0x3C000000
    small = np.array(
        [0, 2**-24, 2**-25, 1.5 * 2**-24, 3 * 2**-26, 2**-14, 65504, 65519.9, 65520, np.inf], np.float32
    )
    bits = np.concatenate([bits, ties, ties + 1, small.view(np.uint32), 0x80000000 | small.view(np.uint32)])
    values = bits.view(np.float32)
    if dtype == "bf16":  # a software device may take numbers below 2^-126 for 0
        values = np.where(np.abs(values) < 2.0**-126, 0, values)
    values = np.concatenate([values, np.array([np.nan], np.float32)])
    found = narrow(on_device(values), dtype).numpy()
    np.testing.assert_array_equal(found.astype(np.float32), values.astype(TYPES[dtype]).astype(np.float32))


class AdamW64:
    """AdamW as the paper has it, in float64."""

    def __init__(self, lr: float, decay: float) -> None:
        self.lr, self.decay, self.t = lr, decay, 0
        self.m: F64 | float = 0.0
        self.v: F64 | float = 0.0

    def __call__(self, p: F64, g: F64) -> F64:
        self.t += 1
        self.m = 0.9 * self.m + 0.1 * g
        self.v = 0.99 * self.v + 0.01 * g * g
        m, v = self.m / (1 - 0.9**self.t), self.v / (1 - 0.99**self.t)
        return p * (1 - self.lr * self.decay) - self.lr * m / (np.sqrt(v) + 1e-8)


class SGD64:
    """Momentum, in float64."""

    def __init__(self, lr: float) -> None:
        self.lr = lr
        self.m: F64 | None = None

    def __call__(self, p: F64, g: F64) -> F64:
        self.m = g if self.m is None else 0.9 * self.m + g
        return p - self.lr * self.m


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_updates_are_those_of_a_copy_in_f32(dtype: str, name: str, accumulation: int) -> None:
    rng = np.random.default_rng(2)
    first = rng.standard_normal((12, 32)).astype(np.float32)
    layer = Linear(32, 12, bias=False)
    layer.load_state_dict({"weight": first}, get_device())
    layer.store_matrices(dtype).requires_grad_()
    weight = layer.weight.tensor
    assert weight.dtype == dtype and weight.nbytes == 2 * first.size
    # Steps so small that most of them would be lost in the narrow type.
    reference: Any = AdamW64(2e-4, 0.1) if name == "adamw" else SGD64(2e-3)
    optimizer: Optimizer = (
        AdamW(layer.named_parameters(), 2e-4, betas=(0.9, 0.99), weight_decay=0.1)
        if name == "adamw"
        else SGD(layer.named_parameters(), 2e-3, momentum=0.9)
    )
    step = TrainingStep(lambda x, y: mse(layer(x), y), optimizer, accumulation=accumulation)
    wide = first.astype(TYPES[dtype]).astype(np.float64)
    for _ in range(8):
        x, y = (rng.standard_normal((40, n)).astype(np.float32) for n in (32, 12))
        for part in range(accumulation):
            step(x[part::accumulation], y[part::accumulation])
        stored = wide.astype(np.float32).astype(TYPES[dtype]).astype(np.float64)
        error = x.astype(np.float64) @ stored.T - y
        wide = reference(wide, (2 / error.size) * error.T @ x)
    np.testing.assert_allclose(optimizer.masters()["weight"], wide, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(weight.numpy(), optimizer.masters()["weight"].astype(TYPES[dtype]))
    assert np.abs(wide - stored).max() > 1e-5  # what is stored has lost what the copy has


@pytest.mark.parametrize("optimizer", [AdamW, Muon])
def test_every_layer_learns_and_goes_on_from_its_copies(optimizer: type[AdamW] | type[Muon]) -> None:
    """Embedding, norm and linear layers; a second run that takes up moments and copies does the same steps."""
    rng = np.random.default_rng(3)
    ids, targets = (rng.integers(0, 16, 64).astype(np.int32) for _ in range(2))

    def build(seed: int) -> tuple[Sequential, Optimizer, TrainingStep]:
        model = Sequential(Embedding(16, 32), LayerNorm(32), Linear(32, 64), Linear(64, 16))
        model.initialize(get_device(), seed).store_matrices("bf16")
        made = optimizer(model.named_parameters(), 3e-3)
        return model, made, TrainingStep(lambda x, y: cross_entropy(model(x), y), made, clip=1.0)

    model, one, step = build(0)
    dtypes = {name: p.tensor.dtype for name, p in model.named_parameters()}
    assert {name for name, dtype in dtypes.items() if dtype == "bf16"} == {"0.weight", "2.weight", "3.weight"}
    for _ in range(10):
        step(ids, targets)
    losses = step.losses()
    assert losses[-1] < losses[0] - 0.1
    other, two, again = build(1)
    other.load_state_dict({name: p.values().astype(np.float32) for name, p in model.named_parameters()})
    two.load_masters(one.masters())
    two.load_state_dict(one.state_dict())
    for each in (step, again):
        for _ in range(4):
            each(ids, targets)
    np.testing.assert_array_equal(step.losses(), again.losses())
    for (name, a), (_, b) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        np.testing.assert_array_equal(a.values(), b.values(), err_msg=name)


def test_packed_weights_do_not_learn() -> None:
    packed = pack(on_device(np.ones((4, 32), np.float32)), "q8")
    packed.requires_grad = True
    with pytest.raises(UsageError, match="must be f32, f16 or bf16, not q8"):
        SGD([packed], 0.1)
    with pytest.raises(DeviceError, match="f16 or bf16, not q8"):
        narrow(on_device(np.ones(4, np.float32)), "q8")
