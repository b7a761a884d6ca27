"""Packing to Q4 with error feedback (GPTQ): what rounding one column does to outputs, later columns make up for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from oazoo.errors import DeviceError
from oazoo.runtime.ops.arithmetic import copied, fill
from oazoo.runtime.ops.common import MAX_ELEMENTS, require, require_dense
from oazoo.runtime.ops.product import weight_gradient
from oazoo.runtime.tensor import BLOCK, Tensor

if TYPE_CHECKING:
    from oazoo.runtime.device import Device

Matrix = npt.NDArray[np.float32] | npt.NDArray[np.float64]

#: How often columns are gone through again; a third time gains next to nothing.
ROUNDS = 2
#: Values that are packed at a time, with as many errors beside them.
_VALUES = 4 << 20


class Feedback:
    """What packing weights to Q4 needs to know of their inputs: how the columns pass errors on.

    For weights w [outputs, inputs] and the mean C of products of inputs, packing goes through the columns in order. Of what
    is left to minimise, tr((w − ŵ) C (w − ŵ)ᵀ) over all later columns, the best they can do about an error of column j is
    row j of U, where C⁻¹ = UᵀU and U is upper triangular: w[k] −= (w[j] − ŵ[j]) U[j, k] / U[j, j]. A block's scale is
    searched for when its turn comes, over its values as they are then, with an error of column j counting 1 / U[j, j]²,
    which is what it costs after the later columns have done their best.

    Frantar, Ashkboos, Hoefler, Alistarh: GPTQ. arXiv:2210.17323.

    That is greedy: a column's code is settled before the later ones are. So the columns are gone through again, block by
    block: with everything else as it is, each gets the code, and each block the scale, that make what is minimised least.

    Args:
        device: where to pack.
        covariance: [inputs, inputs], symmetric, mean products of the inputs; inputs a multiple of 32.
        damping: this much of the diagonal's mean is added to the diagonal, as if inputs had so much noise.
        rounds: how often to go through the columns again.

    Raises:
        DeviceError: another shape, values that are not finite, or nothing on the diagonal.
    """

    def __init__(self, device: Device, covariance: Matrix, damping: float, rounds: int = ROUNDS) -> None:
        upper = factor(covariance, damping)
        inputs = upper.shape[0]
        self._device, self.inputs, self._rounds = device, inputs, rounds
        starts = range(0, inputs, BLOCK)
        # All above the diagonal's blocks, a column of blocks after another: a block's part is rows that lie together.
        above = [upper[:start, start : start + BLOCK] for start in starts]
        self._above = Tensor.from_numpy(device, np.concatenate([*above, np.zeros((1, BLOCK))]), "f32")
        # Every row from its diagonal on.
        blocks = np.zeros((inputs, BLOCK))
        for column in range(inputs):
            count = BLOCK - column % BLOCK
            blocks[column, :count] = upper[column, column : column + count]
        self._factors = Tensor.from_numpy(device, blocks, "f32")
        weights = upper.diagonal() ** -2.0
        self._weights = Tensor.from_numpy(device, (weights / weights.mean()).reshape(-1, BLOCK), "f32")
        if rounds:
            self._place_moments(np.asarray(covariance, np.float32), damping)

    def _place_moments(self, covariance: npt.NDArray[np.float32], damping: float) -> None:
        """What refining a block needs: its own moments, each row from its diagonal on, and those with all other blocks."""
        c = covariance / covariance.diagonal().mean()
        c[np.diag_indices_from(c)] += np.float32(damping)
        count = self.inputs // BLOCK
        own = np.empty((count, BLOCK, BLOCK), np.float32)
        others = np.ascontiguousarray(c.reshape(self.inputs, count, BLOCK).transpose(1, 0, 2))
        for block in range(count):
            at = slice(block * BLOCK, (block + 1) * BLOCK)
            for column in range(BLOCK):
                own[block, column] = np.roll(others[block, at][column], -column)
            others[block, at] = 0
        self._own = Tensor.from_numpy(self._device, own.reshape(-1, BLOCK))
        self._others = Tensor.from_numpy(self._device, others.reshape(-1, BLOCK))

    def pack(
        self, weights: npt.NDArray[np.float32]
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.float32]]:
        """Pack f32 [outputs, inputs], finite, in device memory for some rows at a time.

        Returns:
            Codes, u32 [blocks, 4], and scales, f32 [blocks].
        """
        outputs, inputs = weights.shape
        require(
            inputs == self.inputs, "feedback", f"weights of {inputs} inputs, a covariance of {self.inputs}"
        )
        step = max(1, min(outputs, _VALUES // inputs))
        codes = np.empty((outputs * inputs // BLOCK, 4), np.uint32)
        scales = np.empty(outputs * inputs // BLOCK, np.float32)
        for first in range(0, outputs, step):
            rows = weights[first : first + step]
            packed = self.pack_tensor(Tensor.from_numpy(self._device, np.ascontiguousarray(rows)))
            place = slice(first * inputs // BLOCK, (first + rows.shape[0]) * inputs // BLOCK)
            some_codes, some_scales = packed.planes()
            codes[place], scales[place] = some_codes.numpy(), some_scales.numpy()
        return codes, scales

    def pack_tensor(self, x: Tensor) -> Tensor:
        """Pack a tensor f32 [outputs, inputs] on the device, which is overwritten: it is where the errors go."""
        op = "feedback"
        require_dense(x, op, "x", "f32", -1, self.inputs)
        outputs = x.shape[0]
        packed = Tensor.empty(self._device, x.shape, "q4")
        codes, scales = packed.planes()
        errors = Tensor.empty(self._device, (self.inputs, outputs))
        passed = Tensor.empty(self._device, (BLOCK, outputs))
        original = copied(x) if self._rounds else x
        kernel = self._device.kernel("feedback_q4")
        for block, start in enumerate(range(0, self.inputs, BLOCK)):
            if start:
                above = start * (start - BLOCK) // (2 * BLOCK)
                weight_gradient(
                    self._above.rows(above, above + start), errors.rows(0, start), out=fill(passed, 0.0)
                )
            kernel.dispatch(
                (-(-outputs // kernel.spec.workgroup_size[0]), 1, 1),
                {
                    "passed": passed if start else None,
                    "factors": self._factors.rows(start, start + BLOCK),
                    "weights": self._weights.rows(block, block + 1),
                },
                {"x": x, "errors": errors.rows(start, start + BLOCK), "codes": codes, "scales": scales},
                rows=outputs,
                inputs=self.inputs,
                block=block,
                work=outputs * BLOCK * 700,
            )
        if self._rounds:
            self._refine(original, codes, scales, errors, passed)
        return packed

    def _refine(self, x: Tensor, codes: Tensor, scales: Tensor, errors: Tensor, passed: Tensor) -> None:
        """Go through all blocks again; ``errors`` and ``passed`` are room to work in."""
        outputs, inputs = x.shape
        kernel = self._device.kernel("refine_q4")
        alone = inputs == BLOCK

        def run(block: int, rounds: int) -> None:
            start = block * BLOCK
            kernel.dispatch(
                (-(-outputs // kernel.spec.workgroup_size[0]), 1, 1),
                {
                    "x": x,
                    "passed": None if alone else passed,
                    "moments": self._own.rows(start, start + BLOCK),
                },
                {"errors": errors.rows(start, start + BLOCK), "codes": codes, "scales": scales},
                rows=outputs,
                inputs=inputs,
                block=block,
                rounds=rounds,
                work=outputs * BLOCK * (20 + 400 * rounds),
            )

        for block in range(inputs // BLOCK):
            run(block, 0)
        for _ in range(self._rounds):
            for block in range(inputs // BLOCK):
                if not alone:
                    others = self._others.rows(block * inputs, (block + 1) * inputs)
                    weight_gradient(others, errors, out=fill(passed, 0.0))
                run(block, 1)


def factor(covariance: Matrix, damping: float) -> npt.NDArray[np.float64]:
    """U, upper triangular with UᵀU the inverse of the damped covariance; float64 [inputs, inputs].

    Raises:
        DeviceError: see :class:`Feedback`.
    """
    op = "feedback"
    c = np.asarray(covariance, np.float64)
    require(c.ndim == 2 and c.shape[0] == c.shape[1] > 0, op, f"a covariance of shape {c.shape}")
    require(c.shape[0] % BLOCK == 0, op, f"{c.shape[0]} inputs are no multiple of {BLOCK}")
    require(c.size <= MAX_ELEMENTS, op, "a covariance has more elements than one run can address")
    require(bool(np.isfinite(c).all()), op, "a covariance with values that are not finite")
    mean = float(c.diagonal().mean())
    require(mean > 0 and damping > 0, op, "no input of these weights is ever anything but 0")
    damped = c / mean
    damped[np.diag_indices_from(damped)] += damping
    try:
        # Backwards, so that C = R Rᵀ with R upper triangular; its inverse is U.
        right = np.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1]
    except np.linalg.LinAlgError:
        raise DeviceError(f"{op}: this is no covariance: it has negative variances") from None
    return _inverse(np.ascontiguousarray(right))


def _inverse(upper: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Of an upper triangular matrix, in a fifth of the steps that a general inverse takes, nearly all of them products."""
    size = upper.shape[0]
    result = np.zeros_like(upper)
    if size <= 64:
        result[:] = np.triu(np.linalg.inv(upper))
        return result
    half = size // 2
    first, last = _inverse(upper[:half, :half]), _inverse(upper[half:, half:])
    result[:half, :half], result[half:, half:] = first, last
    result[:half, half:] = -(first @ upper[:half, half:]) @ last
    return result
