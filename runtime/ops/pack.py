"""Packing dense tensors into the Q4 and Q8 blocks of the `.oam` format, on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from oazoo.errors import DeviceError
from oazoo.runtime.ops.common import eight_lanes, require, require_dense
from oazoo.runtime.tensor import BLOCK, BLOCK_CODE_BYTES, DTYPES, Tensor

if TYPE_CHECKING:
    from oazoo.runtime.device import Device
    from oazoo.runtime.memory import Range

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


class PackSlot:
    """A place for one piece on its way through a :class:`Packer`: ``room``, fill, ``start``, ``finish``, and again.

    Where the host sees the device's memory, pieces are filled in and read out where they lie; elsewhere they are copied by
    commands queued with the kernel, so that the host waits for neither.
    """

    def __init__(self, device: Device, encoding: str, elements: int, method: str) -> None:
        self._device, self.encoding, self._elements, self._method = device, encoding, elements, method
        # One place for input of any type: float32 is the widest.
        self._input = Tensor.empty(device, (elements,), "f32")
        self._output = Tensor.empty(device, (elements,), encoding)
        self._odd = Tensor.empty(device, (2,), "u32")
        unified = self._input.memory.host is not None
        direct = unified and device.allocator.readable
        self._sent = None if unified else device.allocator.allocate_host(self._input.nbytes)
        self._odd_at = -(-self._output.nbytes // 16) * 16
        self._got = None if direct else device.allocator.allocate_host(self._odd_at + self._odd.nbytes)
        self._piece = Tensor(device, (0,), "f32", self._input.memory)
        self._submission = 0

    def room(self, count: int, dtype: str) -> npt.NDArray[Any]:
        """Where the next piece goes: ``count`` values of a type of :data:`PACKABLE`, to be filled in before :meth:`start`.

        Raises:
            DeviceError: more values than the packer was made for.
        """
        if count > self._elements:
            raise DeviceError(f"{count} values for a packer of {self._elements}")
        self._piece = Tensor(self._device, (count,), dtype, self._input.memory)
        host = (self._sent or self._input.memory).host
        assert host is not None
        return host[: self._piece.nbytes].view(DTYPES[dtype])

    def start(self, weights: Tensor | None = None, first: int = 0) -> None:
        """Send the piece on its way; see :meth:`Packer.__call__`."""
        device, piece = self._device, self._piece
        if self._sent is not None:
            device.copy(_place(self._sent), _place(piece.memory), piece.nbytes)
        fresh = np.array([0, 2**32 - 1], np.uint32).view(np.uint8)
        if self._odd.memory.host is not None:
            self._odd.memory.host[: fresh.size] = (
                fresh  # nothing that is queued uses it: the last piece is finished
            )
        else:
            device.update(_place(self._odd.memory), fresh)
        packed = Tensor(device, piece.shape, self.encoding, self._output.memory)
        _run(piece, packed, self._odd, self._method, weights, first)
        if self._got is not None:
            device.copy(_place(packed.memory), _place(self._got), packed.nbytes)
            device.copy(_place(self._odd.memory), _place(self._got, self._odd_at), self._odd.nbytes)
        device.flush()
        self._submission = device.submitted

    def finish(self) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.float32], NonFinite]:
        """Wait for the piece. What is returned lies in the slot, and is there until :meth:`start` is called again."""
        self._device.wait(self._submission)
        if self._got is not None:
            host, odd = self._got.host, self._got.host
            assert odd is not None
            odd = odd[self._odd_at :]
        else:
            host, odd = self._output.memory.host, self._odd.memory.host
        assert host is not None and odd is not None
        blocks = -(-self._piece.numel // BLOCK)
        end = blocks * BLOCK_CODE_BYTES[self.encoding]
        count, first = (int(n) for n in odd[:8].view(np.uint32))
        return (
            host[:end].view(np.uint32).reshape(blocks, -1),
            host[end : end + 4 * blocks].view(np.float32),
            NonFinite(count, first if count else -1),
        )


def _place(memory: Range, offset: int = 0) -> tuple[Any, int, int]:
    return memory.block.buffer, memory.offset + offset, memory.address + offset


class Packer:
    """Packs pieces of up to ``elements`` values, one after another, in memory that is taken once.

    Args:
        device: where to pack.
        encoding: ``q4`` or ``q8``.
        elements: values of the largest piece.
        method: see :func:`pack`.
        slots: how many pieces can be on their way at a time.
    """

    def __init__(
        self, device: Device, encoding: str, elements: int, method: str = "absmax", slots: int = 1
    ) -> None:
        _check_method(encoding, method)
        self._device = device
        #: In the order of use: the next piece goes to the first.
        self.slots = [PackSlot(device, encoding, elements, method) for _ in range(slots)]

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
        slot = self.slots[0]
        dtype = next(name for name in PACKABLE if DTYPES[name] == values.dtype)
        slot.room(values.size, dtype)[:] = values
        slot.start(weights, first)
        codes, scales, odd = slot.finish()
        return codes.copy(), scales.copy(), odd


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
    name = f"{'encode' if search else 'pack'}_{packed.dtype}_{x.dtype}"
    if not search and x.dtype == "f32" and x.address % 8 == 0 and eight_lanes(x.device):
        name += "_wide"
    kernel = x.device.kernel(name)
    reads: dict[str, Tensor | None] = {"x": x}
    scalars: dict[str, Any] = {}
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
