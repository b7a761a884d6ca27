"""Packing dense tensors into the Q4 and Q8 blocks of the `.oam` format, on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from oazoo.errors import DeviceError
from oazoo.runtime.ops.common import require, require_dense
from oazoo.runtime.tensor import BLOCK, BLOCK_CODE_BYTES, DTYPES, Tensor

if TYPE_CHECKING:
    from oazoo.runtime.device import Device

#: Dense types that can be packed.
PACKABLE = ("f32", "f16", "bf16")
#: How a block's scale is chosen: by its largest magnitude, as the format's own encoder does, or by search.
METHODS = ("absmax", "search")
#: Operations a value: for q4 a search step is some 200, and a block takes about 100 of them; q8 tries 192 scales.
_SEARCH_WORK = {"q4": 600, "q8": 1500}


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
        method: see :func:`pack`.
    """

    def __init__(self, device: Device, encoding: str, elements: int, method: str = "absmax") -> None:
        _check_method(encoding, method)
        self._device, self._encoding, self._elements, self._method = device, encoding, elements, method
        # One place for input of any type: float32 is the widest.
        self._input = Tensor.empty(device, (elements,), "f32")
        self._output = Tensor.empty(device, (elements,), encoding)
        self._odd = Tensor.empty(device, (2,), "u32")

    def place(self, weights: npt.NDArray[np.float32]) -> Tensor:
        """Weights where a call can take them."""
        return Tensor.from_numpy(self._device, weights)

    def __call__(
        self, values: npt.NDArray[Any], weights: Tensor | None = None, first: int = 0
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32], NonFinite]:
        """Pack a 1-D array of float32, float16 or bfloat16.

        Args:
            values: the next piece of the flattened tensor.
            weights: see :func:`pack`.
            first: which element of the tensor the piece begins with; where its weights begin follows from it.

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
        _run(piece, packed, self._odd, self._method, weights, first)
        codes, scales = packed.planes()
        count, first = (int(n) for n in self._odd.numpy())
        return codes.numpy(), scales.numpy(), NonFinite(count, first if count else -1)


def _check_method(encoding: str, method: str) -> None:
    if encoding not in BLOCK_CODE_BYTES:
        raise DeviceError(f"there is no encoding {encoding!r}; there are {', '.join(BLOCK_CODE_BYTES)}")
    if method not in METHODS:
        raise DeviceError(f"there is no method {method!r}; there are {', '.join(METHODS)}")


def pack(x: Tensor, encoding: str, method: str = "absmax", weights: Tensor | None = None) -> Tensor:
    """Pack a dense tensor, flattened row-major, into blocks of 32.

    By ``absmax`` the bits are those of the format's encoder rules on every device: the kernel settles scales and codes in
    integer arithmetic, whatever the device's division and subnormals do. By ``search`` a block gets the scale and the codes
    that make the sum of weighted squared errors least: for q4 the least over every scale of either sign and all 16 codes,
    for q8 within 0.2 % of the least over every scale that clips nothing. Blocks with values that are not
    finite, or whose largest is below 2^-100 are packed by absmax also then.

    Args:
        x: f32, f16 or bf16 tensor of any shape with at least one element.
        encoding: ``q4`` or ``q8``.
        method: ``absmax`` or ``search``.
        weights: f32 [n], finite and not negative: element i of the flattened tensor counts ``weights[i % n]``, so that with
            one for each input of a layer they are that layer's column weights. None: all count the same. Only for search.

    Returns:
        A tensor of the same shape in that encoding.

    Raises:
        DeviceError: another type or encoding, no elements (the format has no empty quantised tensors), or a view whose last
            block would reach past the memory it lies in.
    """
    _check_method(encoding, method)
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
    _run(x, packed, Tensor.empty(x.device, (2,), "u32"), method, weights, 0)
    return packed


def _run(x: Tensor, packed: Tensor, odd: Tensor, method: str, weights: Tensor | None, first: int) -> None:
    codes, scales = packed.planes()
    search = method == "search"
    kernel = x.device.kernel(f"{'encode' if search else 'pack'}_{packed.dtype}_{x.dtype}")
    reads: dict[str, Tensor | None] = {"x": x}
    scalars = {}
    if weights is not None:
        require(search, "pack", "weights are for the method search")
        require_dense(weights, "pack", "weights", "f32", -1)
        require(weights.numel > 0, "pack", "no weights")
    if search:
        reads["weights"] = weights
        width = 32 if weights is None else weights.numel
        scalars = {"width": width, "first": first % width}
    blocks = -(-x.numel // BLOCK)
    groups = -(-blocks // kernel.spec.workgroup_size[0])
    # Rows of groups, because devices allow 65,535 of them along x.
    columns = min(groups, 65535)
    kernel.dispatch(
        (columns, -(-groups // columns), 1),
        reads,
        {"codes": codes, "scales": scales, "odd": odd},
        count=x.numel,
        blocks=blocks,
        columns=columns,
        work=x.numel * _SEARCH_WORK[packed.dtype] if search else 0,
        **scalars,
    )
