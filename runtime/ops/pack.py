"""Packing dense tensors into the Q4 and Q8 blocks of the `.oam` format, on the device."""

from __future__ import annotations

from oazoo.errors import DeviceError
from oazoo.runtime.tensor import BLOCK, BLOCK_CODE_BYTES, DTYPES, Tensor

#: Dense types that can be packed.
PACKABLE = ("f32", "f16", "bf16")


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
    codes, scales = packed.planes()
    kernel = x.device.kernel(f"pack_{encoding}_{x.dtype}")
    groups = -(-blocks // kernel.spec.workgroup_size[0])
    # Rows of groups, because devices allow 65,535 of them along x.
    columns = min(groups, 65535)
    kernel.dispatch(
        (columns, -(-groups // columns), 1),
        {"x": x},
        {"codes": codes, "scales": scales},
        count=x.numel,
        blocks=blocks,
        columns=columns,
    )
    return packed
