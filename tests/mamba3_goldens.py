"""Reference numbers of Mamba-3 (tests/data/mamba3), and how its kernels' inputs become rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from mamba3_reference import circular
from oa_goldens import close, on_device

from oazoo.runtime import Tensor
from oazoo.runtime.ops.mamba3 import Mamba3Form, Mamba3States, Mamba3Weights, state_shapes

DATA = Path(__file__).parent / "data" / "mamba3"
Arrays = dict[str, npt.NDArray[Any]]
STATES = ("angle", "ssm", "k", "v")
PIECES = ("Z", "V", "K", "Q", "DT", "ADT", "Trap", "Angles")
WEIGHTS = {
    "b_bias": "K_bias",
    "c_bias": "Q_bias",
    "d": "D",
    "norm": "norm_weight",
    "mimo_x": "mimo_x",
    "mimo_z": "mimo_z",
    "mimo_o": "mimo_o",
}


def golden(name: str) -> Arrays:
    with np.load(DATA / f"{name}.npz", allow_pickle=False) as file:
        return {key: file[key] for key in file.files}


def form_of(arrays: Arrays) -> Mamba3Form:
    """The form of a file at the level of the reference's kernels: dt and A·dt given, keys and queries normalised."""
    mimo = arrays["Q"].ndim == 5
    return Mamba3Form(
        heads=arrays["V"].shape[2],
        head_dim=arrays["V"].shape[3],
        state_size=arrays["Q"].shape[-1],
        num_groups=arrays["Q"].shape[-2],
        rank=arrays["Q"].shape[2] if mimo else 1,
        num_angles=arrays["Angles"].shape[-1],
        half_pairs=mimo,
        direct=True,
        normed=True,
        own_angles=True,
        output_norm="norm_weight" in arrays,
        gated="Z" in arrays,
    )


def rows_of(arrays: Arrays) -> npt.NDArray[np.float32]:
    """The inputs as rows; z is 0 where there is none."""
    rows = arrays["V"].shape[0] * arrays["V"].shape[1]
    parts = []
    for name in PIECES:
        part = arrays.get(name, np.zeros_like(arrays["V"]))
        part = np.moveaxis(part, 1, 2) if name in ("DT", "ADT", "Trap") else part
        parts.append(part.reshape(rows, -1))
    return np.concatenate(parts, axis=1)


def pieces_of(rows: npt.NDArray[np.float32], form: Mamba3Form, arrays: Arrays) -> Arrays:
    """The other way round."""
    batch, tokens = arrays["V"].shape[:2]
    found = {}
    for name, part in zip(PIECES, np.split(rows, np.cumsum(form.widths)[:-1], axis=1), strict=True):
        if name in ("DT", "ADT", "Trap"):
            found[name] = np.moveaxis(part.reshape(batch, tokens, -1), 2, 1)
        elif name in arrays:
            found[name] = part.reshape(arrays[name].shape)
    return found


def weights_of(arrays: Arrays) -> Mamba3Weights:
    return Mamba3Weights(
        **{ours: on_device(arrays[name], grad=True) for ours, name in WEIGHTS.items() if name in arrays}
    )


def states_of(arrays: Arrays, form: Mamba3Form, sequences: int) -> Mamba3States | None:
    if "in_ssm" not in arrays:
        return None
    shapes = state_shapes(form, sequences)
    return Mamba3States(
        *(
            on_device(arrays[f"in_{name}"].reshape(shape), grad=True)
            for name, shape in zip(STATES, shapes, strict=True)
        )
    )


def check_states(states: Mamba3States, arrays: Arrays, prefix: str) -> None:
    """The states are the file's: angles on the circle."""
    assert circular(states.angle.numpy().reshape(-1), arrays[f"{prefix}_angle"].reshape(-1)) <= 1e-4
    for name, tensor in zip(STATES[1:], states[1:], strict=True):
        close(tensor, arrays[f"{prefix}_{name}"])


def tensor(array: npt.NDArray[Any], like: Tensor) -> Tensor:
    return on_device(np.ascontiguousarray(array, np.float32).reshape(like.shape))
