"""Block scales of packed weights that learn, while the codes stay as they are."""

from __future__ import annotations

from oazoo.runtime.ops.common import grid, portable_only, require, require_dense
from oazoo.runtime.tensor import BLOCK, BLOCK_CODE_BYTES, Tensor

#: Blocks of a workgroup.
_BLOCKS = 64


def learned(weight: Tensor) -> Tensor:
    """What gradients of a product with ``weight`` go to: its scales if they learn, else the weight itself."""
    return weight if weight.scales is None else weight.scales


def scale_gradient(gradient: Tensor, weight: Tensor, *, variant: str | None = None) -> Tensor:
    """The gradient of a packed weight's scales: over each block of 32, the sum of the weight's gradient times the code.

    Args:
        gradient: f32 of the weight's shape.
        weight: q4 or q8.
        variant: ``lanes`` for processors or ``group`` for any device; the fastest if None.

    Returns:
        f32 [blocks].
    """
    op = "scale_gradient"
    require(weight.dtype in BLOCK_CODE_BYTES, op, f"a {weight.dtype} weight has no scales")
    require_dense(gradient, op, "gradient", "f32", *weight.shape)
    if variant is None:
        variant = "lanes" if gradient.device.info.is_software and not portable_only() else "group"
    codes, _ = weight.planes()
    blocks = -(-weight.numel // BLOCK)
    y = Tensor.empty(gradient.device, (blocks,))
    groups = grid(-(-blocks // _BLOCKS))
    gradient.device.kernel(f"scale_gradient_{variant}_{weight.dtype}").dispatch(
        groups,
        {"dw": gradient, "codes": codes},
        {"y": y},
        count=weight.numel,
        blocks=blocks,
        columns=groups[0],
    )
    return y


def learned_gradient(gradient: Tensor, weight: Tensor) -> Tensor:
    """The gradient of :func:`learned` of ``weight``, from the gradient of the weight, f32 of its shape."""
    return gradient if weight.scales is None else scale_gradient(gradient, weight)
