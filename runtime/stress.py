"""Does the largest buffer that is used really hold what is written to it?

Drivers exist that accept a buffer of 4 GiB and return zeros past 2 GiB of it, in silence. ``python -m
oazoo.runtime.stress`` fills marks all over one buffer of the largest size that the runtime uses, reads them back through a
kernel and through a transfer, and prints the outcome as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from oazoo.errors import DeviceError
from oazoo.runtime.device import Device, get_device
from oazoo.runtime.tensor import Tensor
from oazoo.runtime.vk import OutOfDeviceMemoryError

#: Distance of the marks. The last row of the buffer is marked too.
SPACING = 256 << 20
#: Floats in a row: the unit in which marks are written, and in which the kernel addresses the buffer.
WIDTH = 64
_ROW_BYTES = WIDTH * 4
_PATIENCE = 600.0


@dataclass(frozen=True)
class Stress:
    """Outcome: the buffer's size, the marked offsets, and those that came back wrong. All are bytes.

    ``problem`` is set when the test itself could not be run.
    """

    nbytes: int
    offsets: list[int]
    wrong_in_kernel: list[int]
    wrong_in_transfer: list[int]
    problem: str | None = None

    @property
    def passed(self) -> bool:
        """Every mark came back, both ways."""
        return self.problem is None and not self.wrong_in_kernel and not self.wrong_in_transfer

    @property
    def good_bytes(self) -> int:
        """Size below which everything came back."""
        return min([self.nbytes, *self.wrong_in_kernel, *self.wrong_in_transfer])


def stress(device: Device | None = None, spacing: int = SPACING) -> Stress:
    """Mark one buffer of the largest size that the runtime uses, or what memory allows, and read the marks back.

    Args:
        device: the default device if None.
        spacing: bytes between marks, a multiple of 256.

    Raises:
        DeviceError: no usable device, or no memory for a buffer of one spacing.
    """
    from oazoo.runtime.ops.embedding import embedding  # the doctor describes outcomes without loading any op

    device = get_device() if device is None else device
    table = _largest(device, spacing)
    rows = sorted({*range(0, table.shape[0], spacing // _ROW_BYTES), table.shape[0] - 1})
    # All marks are written before the first is read: a buffer that wraps around would pass otherwise.
    for number, row in enumerate(rows, 1):
        table.rows(row, row + 1).write(np.full((1, WIDTH), number, np.float32))
    ids = Tensor.from_numpy(device, np.array(rows, np.int32))
    in_kernel = embedding(ids, table).numpy()
    in_transfer = np.concatenate([table.rows(row, row + 1).numpy() for row in rows])
    offsets = [row * _ROW_BYTES for row in rows]
    return Stress(table.nbytes, offsets, compare(rows, in_kernel), compare(rows, in_transfer))


def compare(rows: list[int], seen: npt.NDArray[np.float32]) -> list[int]:
    """Byte offsets of the rows whose marks, 1, 2, … in the order of ``rows``, are not what was ``seen``."""
    marks = np.arange(1, len(rows) + 1, dtype=np.float32)[:, None]
    return [row * _ROW_BYTES for row, good in zip(rows, (seen == marks).all(axis=1)) if not good]


def _largest(device: Device, least: int) -> Tensor:
    nbytes = device.allocator.max_buffer_bytes
    while True:
        try:
            return Tensor.empty(device, (nbytes // _ROW_BYTES, WIDTH), "f32")
        except OutOfDeviceMemoryError:
            nbytes //= 2
            if nbytes < least:
                raise


def run_stress() -> Stress:
    """Run :func:`stress` in a child process, so that a driver that crashes or hangs is a finding and not our end."""
    command = [sys.executable, "-m", "oazoo.runtime.stress"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        return Stress(0, [], [], [], f"no answer within {_PATIENCE:.0f} s")
    try:
        return Stress(**json.loads(done.stdout))
    except (ValueError, TypeError):
        words = done.stderr.strip().splitlines()
        how = (
            f"died of signal {-done.returncode}" if done.returncode < 0 else f"exit status {done.returncode}"
        )
        return Stress(0, [], [], [], f"{how}: {words[-1]}" if words else how)


def main() -> int:
    """``python -m oazoo.runtime.stress``."""
    try:
        outcome = stress()
    except DeviceError as error:
        outcome = Stress(0, [], [], [], str(error))
    print(json.dumps(asdict(outcome)))
    return 0 if outcome.passed else 1


if __name__ == "__main__":
    sys.exit(main())
