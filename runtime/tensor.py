"""Tensors on a device: a shape, an encoding, and a range of device memory."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Self

import ml_dtypes
import numpy as np
import numpy.typing as npt

from oazoo.errors import DeviceError
from oazoo.runtime.memory import Range
from oazoo.runtime.recording import INLINE_BYTES, Span

if TYPE_CHECKING:
    from oazoo.runtime.device import Device

#: Dense element types that kernels know, with their NumPy form.
DTYPES: dict[str, np.dtype[Any]] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "i32": np.dtype(np.int32),
    "u32": np.dtype(np.uint32),
    "u8": np.dtype(np.uint8),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
#: Largest write from the host that is queued rather than waited for.
_QUEUED_BYTES = 16 * INLINE_BYTES
#: Block encodings of the `.oam` format: bytes of codes in a block of 32; a float32 scale a block follows in a second plane.
BLOCK_CODE_BYTES = {"q4": 16, "q8": 32}
BLOCK = 32


def encoded_bytes(shape: Sequence[int], dtype: str) -> int:
    """Bytes that a tensor of this shape and encoding takes, as in an `.oam` file."""
    count = prod(shape)
    if dtype in DTYPES:
        return count * DTYPES[dtype].itemsize
    if dtype in BLOCK_CODE_BYTES:
        return -(-count // BLOCK) * (BLOCK_CODE_BYTES[dtype] + 4)
    raise DeviceError(
        f"the runtime holds no tensors of type {dtype!r}; it knows {', '.join([*DTYPES, *BLOCK_CODE_BYTES])}"
    )


class Tensor:
    """An n-dimensional array in device memory, row-major.

    ``dtype`` is a dense type (f32, f16, bf16, i32, u32, u8) or a block encoding (q4, q8) whose bytes are those of the `.oam`
    file: the plane of codes, then the plane of float32 scales. Views made with :meth:`view` and :meth:`rows` share memory.
    """

    __slots__ = ("device", "dtype", "grad", "memory", "nbytes", "offset", "requires_grad", "scales", "shape")

    def __init__(
        self, device: Device, shape: tuple[int, ...], dtype: str, memory: Range, offset: int = 0
    ) -> None:
        self.device, self.shape, self.dtype, self.memory, self.offset = device, shape, dtype, memory, offset
        self.nbytes = encoded_bytes(shape, dtype)
        #: Whether a :class:`~oazoo.runtime.tape.GradientTape` takes gradients with respect to this tensor, and their sum.
        self.requires_grad = False
        self.grad: Tensor | None = None
        #: The trainable scale plane of a q4 or q8 tensor (:meth:`learn_scales`): gradients of ``linear``, ``gated`` and
        #: ``embedding`` with it go there; None while it is frozen. Views have none.
        self.scales: Tensor | None = None

    @classmethod
    def empty(cls, device: Device, shape: Sequence[int], dtype: str = "f32") -> Self:
        """Memory for a tensor, its values undefined."""
        size = encoded_bytes(shape, dtype)
        return cls(device, tuple(int(n) for n in shape), dtype, device.allocate(size))

    @classmethod
    def from_numpy(cls, device: Device, array: npt.ArrayLike, dtype: str | None = None) -> Self:
        """Copy an array to the device; ``dtype`` converts it first (float64 and int64 must name one)."""
        values = np.asarray(array)
        if dtype is not None:
            values = values.astype(DTYPES[dtype], copy=False)
        name = _NAMES.get(values.dtype)
        if name is None:
            raise DeviceError(
                f"arrays of {values.dtype} cannot go to the device; say dtype=… ({', '.join(DTYPES)})"
            )
        tensor = cls.empty(device, values.shape, name)
        tensor.write(values)
        return tensor

    @classmethod
    def from_bytes(
        cls, device: Device, shape: Sequence[int], dtype: str, data: npt.NDArray[np.uint8] | bytes
    ) -> Self:
        """Copy stored bytes to the device as they lie; their number must be that of the shape and encoding."""
        tensor = cls.empty(device, shape, dtype)
        raw = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data.reshape(-1).view(np.uint8)
        if raw.nbytes != tensor.nbytes:
            raise DeviceError(
                f"{raw.nbytes} bytes for a {dtype} tensor of shape {tuple(shape)}, which takes {tensor.nbytes}"
            )
        tensor._upload(raw)
        return tensor

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def address(self) -> int:
        """Device address of the first byte."""
        return self.memory.address + self.offset

    @property
    def span(self) -> Span:
        """Device addresses touched: first byte, and one past the last."""
        start = self.memory.address + self.offset
        return start, start + self.nbytes

    def view(self, *shape: int) -> Tensor:
        """The same elements in another shape (dense tensors, or any shape of as many elements)."""
        if prod(shape) != self.numel:
            raise DeviceError(f"{self.shape} has {self.numel} elements, {shape} has {prod(shape)}")
        return Tensor(self.device, tuple(shape), self.dtype, self.memory, self.offset)

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows ``start`` to ``stop`` of the first axis, sharing memory; dense tensors only."""
        if self.dtype not in DTYPES:
            raise DeviceError(
                f"rows of a {self.dtype} tensor do not lie together: its scales are a second plane"
            )
        if not self.shape or not 0 <= start <= stop <= self.shape[0]:
            raise DeviceError(f"rows {start} to {stop} are not within {self.shape}")
        row = prod(self.shape[1:]) * DTYPES[self.dtype].itemsize
        return Tensor(
            self.device, (stop - start, *self.shape[1:]), self.dtype, self.memory, self.offset + start * row
        )

    def planes(self) -> tuple[Tensor, Tensor]:
        """The two planes of a q4 or q8 tensor, sharing memory: codes as u32 [blocks, 4 or 8], scales as f32 [blocks]."""
        if self.dtype not in BLOCK_CODE_BYTES:
            raise DeviceError(f"a {self.dtype} tensor has no code and scale planes")
        blocks, code_bytes = -(-self.numel // BLOCK), BLOCK_CODE_BYTES[self.dtype]
        codes = Tensor(self.device, (blocks, code_bytes // 4), "u32", self.memory, self.offset)
        return codes, Tensor(self.device, (blocks,), "f32", self.memory, self.offset + blocks * code_bytes)

    def learn_scales(self) -> Tensor:
        """Let the scales of a q4 or q8 tensor learn, its codes staying as they are: gives f32 [blocks], also in ``scales``.

        It shares memory and requires a gradient: what updates it in place changes the packed values. Setting ``scales`` to
        None freezes the tensor again.

        Raises:
            DeviceError: a dense tensor, which has no scales.
        """
        _, scales = self.planes()
        scales.requires_grad = True
        self.scales = scales
        return scales

    def write(self, array: npt.ArrayLike) -> None:
        """Replace all values from the host; work queued before still sees the old ones."""
        values = np.asarray(array, DTYPES[self.dtype], order="C")
        if values.shape != self.shape:
            raise DeviceError(f"an array of shape {values.shape} for a tensor of shape {self.shape}")
        self._upload(values.reshape(-1).view(np.uint8))

    def _upload(self, raw: npt.NDArray[np.uint8]) -> None:
        device = self.device
        if device.capturing:
            raise DeviceError(
                "a tensor cannot be written while a program is captured: write it before, or before a run"
            )
        host = self.memory.host
        # Small ones are queued like any other command, so that nobody waits; where nothing is queued, nobody would.
        queue = 0 < raw.nbytes <= _QUEUED_BYTES and raw.nbytes % 4 == 0 and self.address % 4 == 0
        if queue and (host is None or device.busy):
            self._inscribe(raw)
            return
        if host is not None:
            device.synchronize()
            host[self.offset : self.offset + raw.nbytes] = raw
            return
        staging = device.allocator.staging()
        assert staging.view is not None
        for start in range(0, raw.nbytes, staging.size):
            part = raw[start : start + staging.size]
            staging.view[: part.nbytes] = part
            device.copy((staging.buffer, 0, staging.address), self.place(start), part.nbytes)
            device.synchronize()

    def inscribe(self, array: npt.ArrayLike) -> None:
        """Replace all values with ones that lie within the queued, or captured, commands themselves.

        Nobody waits, and a replay writes them again; for small tables that a kernel reads.
        """
        values = np.asarray(array, DTYPES[self.dtype], order="C")
        if values.shape != self.shape or self.nbytes % 4 or self.address % 4:
            raise DeviceError(f"an array of shape {values.shape} cannot be inscribed in {self!r}")
        self._inscribe(values.reshape(-1).view(np.uint8))

    def _inscribe(self, raw: npt.NDArray[np.uint8]) -> None:
        for start in range(0, raw.nbytes, INLINE_BYTES):
            self.device.update(self.place(start), raw[start : start + INLINE_BYTES])

    def place(self, start: int = 0) -> tuple[Any, int, int]:
        """Where byte ``start`` lies, as :meth:`Device.copy` wants it: VkBuffer, offset in it, device address."""
        return self.memory.block.buffer, self.memory.offset + self.offset + start, self.address + start

    def bytes(self) -> npt.NDArray[np.uint8]:
        """The stored bytes [nbytes], copied to the host when all queued work is done."""
        device = self.device
        if device.capturing:
            raise DeviceError("a tensor cannot be read while a program is captured")
        host = self.memory.host
        if host is not None and device.allocator.readable:
            device.synchronize()
            return host[self.offset : self.offset + self.nbytes].copy()
        result = np.empty(self.nbytes, np.uint8)
        staging = device.allocator.staging()
        assert staging.view is not None
        for start in range(0, self.nbytes, staging.size):
            size = min(staging.size, self.nbytes - start)
            device.copy(self.place(start), (staging.buffer, 0, staging.address), size)
            device.synchronize()
            result[start : start + size] = staging.view[:size]
        return result

    def numpy(self) -> npt.NDArray[Any]:
        """The values as an array of the tensor's shape; dense tensors only (decode q4 and q8 with ``ops.dequantize``)."""
        if self.dtype not in DTYPES:
            raise DeviceError(f"a {self.dtype} tensor has no plain values; use ops.dequantize, or bytes()")
        return self.bytes().view(DTYPES[self.dtype]).reshape(self.shape)

    def __repr__(self) -> str:
        return f"Tensor({self.dtype}{list(self.shape)} on {self.device.info.name})"
