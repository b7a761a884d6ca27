"""Packing dense tensors into the Q4 and Q8 blocks of the `.oam` format, on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from oazoo.errors import DeviceError
from oazoo.runtime.tensor import BLOCK, BLOCK_CODE_BYTES, DTYPES, Tensor

if TYPE_CHECKING:
    from oazoo.runtime.device import Device

#: Dense types that can be packed.
PACKABLE = ("f32", "f16", "bf16")


@dataclass(frozen=True)
class NonFinite:
    """What packing found that is no finite number: how many values, and the index of the first (-1 if none)."""

    count: int
    first: int


class Packer:
    """Packs pieces of up to ``elements`` values, one after another, in device memory that is taken once.

    Args:
        device: where to pack.
        encoding: ``q4`` or ``q8``.
        elements: values of the largest piece.
    """

    def __init__(self, device: Device, encoding: str, elements: int) -> None:
        self._device, self._encoding, self._elements = device, encoding, elements
        # One place for input of any type: float32 is the widest.
        self._input = Tensor.empty(device, (elements,), "f32")
        self._output = Tensor.empty(device, (elements,), encoding)
        self._odd = Tensor.empty(device, (2,), "u32")

    def __call__(
        self, values: npt.NDArray[Any]
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32], NonFinite]:
        """Pack a 1-D array of float32, float16 or bfloat16.

        Returns:
            Codes as u32 [blocks, 4 or 8], scales [blocks], and what was not finite (packed as 0).
        """
        dtype = next(name for name in PACKABLE if DTYPES[name] == values.dtype)
        if values.size > self._elements:
            raise DeviceError(f"{values.size} values for a packer of {self._elements}")
        piece = Tensor(self._device, values.shape, dtype, self._input.memory)
        piece.write(values)
        packed = Tensor(self._device, values.shape, self._encoding, self._output.memory)
        self._odd.write(np.array([0, 2**32 - 1], np.uint32))
        _run(piece, packed, self._odd)
        codes, scales = packed.planes()
        count, first = (int(n) for n in self._odd.numpy())
        return codes.numpy(), scales.numpy(), NonFinite(count, first if count else -1)


def pack(x: Tensor, encoding: str) -> Tensor:
    """Pack a dense tensor, flattened row-major, into blocks of 32.

    The bits are those of the format's encoder rules on every device: the kernel settles scales and codes in integer
    arithmetic, whatever the device's division and subnormals do.

    Args:
        x: f32, f16 or bf16 tensor of any shape with at least one element.
        encoding: ``q4`` or ``q8``.

    Returns:
        A tensor of the same shape in that encoding.

    Raises:
        DeviceError: another type or encoding, no elements (the format has no empty quantised tensors), or a view whose last
            block would reach past the memory it lies in.
    """
    if encoding not in BLOCK_CODE_BYTES:
        raise DeviceError(f"there is no encoding {encoding!r}; there are {', '.join(BLOCK_CODE_BYTES)}")
    if x.dtype not in PACKABLE:
        raise DeviceError(f"{x.dtype} tensors cannot be packed; {', '.join(PACKABLE)} can")
    if x.numel == 0:
        raise DeviceError("a tensor without elements cannot be packed")
    if x.numel >= 2**31:
        raise DeviceError(f"{x.numel:,} elements are more than one run packs; pack it in parts")
    blocks = -(-x.numel // BLOCK)
    # The last block is read in full, and addresses know no bounds: it must lie within x's memory. It does unless x is a
    # view that starts off the beat.
    inside = x.offset + blocks * BLOCK * DTYPES[x.dtype].itemsize <= x.memory.size
    if x.address % 4 or not inside:
        raise DeviceError(
            "these rows do not lie where they can be packed: pack a copy of them, or the whole tensor"
        )
    packed = Tensor.empty(x.device, x.shape, encoding)
    _run(x, packed, Tensor.empty(x.device, (2,), "u32"))
    return packed


def _run(x: Tensor, packed: Tensor, odd: Tensor) -> None:
    codes, scales = packed.planes()
    kernel = x.device.kernel(f"pack_{packed.dtype}_{x.dtype}")
    blocks = -(-x.numel // BLOCK)
    groups = -(-blocks // kernel.spec.workgroup_size[0])
    # Rows of groups, because devices allow 65,535 of them along x.
    columns = min(groups, 65535)
    kernel.dispatch(
        (columns, -(-groups // columns), 1),
        {"x": x},
        {"codes": codes, "scales": scales, "odd": odd},
        count=x.numel,
        blocks=blocks,
        columns=columns,
    )
