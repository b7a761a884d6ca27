"""Gradients of device code against central differences of float64 NumPy forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from oazoo.runtime import Tensor, get_device
from oazoo.runtime.tape import GradientTape

F64 = npt.NDArray[np.float64]
RNG = np.random.default_rng(20)


def normal(*shape: int) -> npt.NDArray[np.float32]:
    return RNG.standard_normal(shape).astype(np.float32)


def check(
    device_form: Callable[..., Tensor],
    numpy_form: Callable[..., F64],
    arrays: Sequence[npt.NDArray[np.float32]],
    *,
    tolerance: float = 2e-4,
    seed: int = 3,
) -> None:
    """Value and gradients of ``sum(form(arrays) * c)`` for fixed random c, against float64 differences."""
    tensors = [Tensor.from_numpy(get_device(), a) for a in arrays]
    for tensor in tensors:
        tensor.requires_grad = True
    with GradientTape() as tape:
        y = device_form(*tensors)
    wide = [a.astype(np.float64) for a in arrays]
    wanted = numpy_form(*wide)
    np.testing.assert_allclose(y.numpy(), wanted, rtol=1e-4, atol=1e-5)
    c = np.random.default_rng(seed).standard_normal(wanted.shape)
    tape.backward(y, Tensor.from_numpy(get_device(), c.astype(np.float32)))
    c = c.astype(np.float32).astype(np.float64)
    for index, tensor in enumerate(tensors):
        assert tensor.grad is not None
        found = tensor.grad.numpy().astype(np.float64)
        numeric = np.empty_like(wide[index])
        flat, out = wide[index].reshape(-1), numeric.reshape(-1)
        for i in range(flat.size):
            before, h = flat[i], 1e-5 * max(1.0, abs(flat[i]))
            flat[i] = before + h
            above = float((numpy_form(*wide) * c).sum())
            flat[i] = before - h
            below = float((numpy_form(*wide) * c).sum())
            flat[i] = before
            out[i] = (above - below) / (2 * h)
        scale = max(float(np.abs(numeric).max()), 1e-3)
        assert np.abs(found - numeric).max() <= tolerance * scale, f"input {index}"
