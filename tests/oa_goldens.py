"""Reference numbers of OA 0.8.6 (tests/data/oa): how to read a file, and how close is close."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from oazoo.nn import Module
from oazoo.runtime import Tensor, get_device
from oazoo.runtime.ops.loss import mse
from oazoo.runtime.tape import GradientTape

DATA = Path(__file__).parent / "data" / "oa"
Arrays = dict[str, npt.NDArray[Any]]


def golden(name: str) -> tuple[Arrays, dict[str, Any]]:
    """The arrays of a file, and its configuration."""
    with np.load(DATA / f"{name}.npz", allow_pickle=False) as file:
        arrays = {key: file[key] for key in file.files}
    return arrays, json.loads(str(arrays.pop("config")))


def close(found: npt.NDArray[Any] | Tensor | None, wanted: npt.NDArray[Any], relative: float = 1e-4) -> None:
    """Within 1e-4 of the largest value, and a rounding error where all are next to nothing."""
    assert found is not None
    values = found.numpy() if isinstance(found, Tensor) else found
    wanted = np.asarray(wanted, np.float64)
    assert values.reshape(-1).shape == wanted.reshape(-1).shape
    difference = np.abs(values.reshape(-1) - wanted.reshape(-1)).max()
    assert difference <= relative * np.abs(wanted).max() + 1e-6


def on_device(array: npt.NDArray[Any], *, grad: bool = False) -> Tensor:
    """A tensor with the values, of which a gradient is taken or not."""
    tensor = Tensor.from_numpy(get_device(), array)
    tensor.requires_grad = grad
    return tensor


def fill(module: Module, arrays: Arrays) -> None:
    """Give a module a file's parameters, which are in the module's own order."""
    module.initialize(get_device())
    parameters = module.parameters()
    assert sum(key.startswith("param_") and key[6:].isdigit() for key in arrays) == len(parameters)
    for index, parameter in enumerate(parameters):
        parameter.assign(arrays[f"param_{index}"])


def check_gradients(module: Module, arrays: Arrays) -> None:
    """The gradients of all parameters are the file's."""
    for index, parameter in enumerate(module.parameters()):
        close(parameter.tensor.grad, arrays[f"grad_{index}"])


def check_layer(
    module: Module,
    arrays: Arrays,
    form: Callable[[Tensor], Tensor],
    of: str = "x",
    output: str = "output",
    loss: str = "loss",
    gradient: str = "grad_input_x",
) -> None:
    """Output, loss (the mean squared distance to the target) and every gradient are the file's."""
    x = on_device(arrays[of], grad=gradient in arrays)
    with GradientTape() as tape:
        y = form(x)
        found = mse(y, on_device(arrays["target"]))
    close(y, arrays[output])
    close(found, arrays[loss])
    tape.backward(found)
    if gradient in arrays:
        close(x.grad, arrays[gradient])
    if "grad_0" in arrays:
        check_gradients(module, arrays)
