"""Packing dense tensors into the Q4 and Q8 blocks of the `.oam` format, on the device."""

from __future__ import annotations

from oazoo.errors import DeviceError
from oazoo.runtime.tensor import BLOCK, BLOCK_CODE_BYTES, Tensor

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
        DeviceError: another type or encoding, or no elements (the format has no empty quantised tensors).
    """
    if encoding not in BLOCK_CODE_BYTES:
        raise DeviceError(f"there is no encoding {encoding!r}; there are {', '.join(BLOCK_CODE_BYTES)}")
    if x.dtype not in PACKABLE:
        raise DeviceError(f"{x.dtype} tensors cannot be packed; {', '.join(PACKABLE)} can")
    if x.numel == 0:
        raise DeviceError("a tensor without elements cannot be packed")
    if x.numel >= 2**31:
        raise DeviceError(f"{x.numel:,} elements are more than one run packs; pack it in parts")
    packed = Tensor.empty(x.device, x.shape, encoding)
    codes, scales = packed.planes()
    kernel = x.device.kernel(f"pack_{encoding}_{x.dtype}")
    blocks = -(-x.numel // BLOCK)
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
