"""Writes that are queued, or lie within commands, and kernels that reach tensors through a table of addresses."""

from __future__ import annotations

import numpy as np
import pytest

from oazoo.errors import DeviceError
from oazoo.runtime import Tensor, get_device
from oazoo.runtime.kernel import merged_spans
from oazoo.runtime.ops.arithmetic import copied
from oazoo.runtime.ops.elementwise import add


@pytest.mark.parametrize("count", [1, 1024, 5000, 40_000])
def test_a_write_behind_queued_work_changes_only_what_follows(count: int) -> None:
    device = get_device()
    x = Tensor.from_numpy(device, np.zeros(count, np.float32))
    before = add(x, x)
    assert device.busy
    x.write(np.arange(count, dtype=np.float32))
    after = copied(x)
    assert not before.numpy().any()
    np.testing.assert_array_equal(after.numpy(), np.arange(count))
    np.testing.assert_array_equal(x.numpy(), np.arange(count))
    assert not device.busy


def test_what_a_program_inscribes_it_writes_at_every_replay() -> None:
    device = get_device()
    values = np.arange(3000, dtype=np.uint32)  # more than one command holds
    table = Tensor.from_numpy(device, np.zeros(3000, np.uint32))
    with device.capture() as program:
        table.inscribe(values)
    for _ in range(2):
        table.write(np.zeros(3000, np.uint32))
        program.run()
        np.testing.assert_array_equal(table.numpy(), values)
    assert device.done(device.submitted)
    with pytest.raises(DeviceError, match="cannot be inscribed"):
        table.inscribe(values[:10])


def test_spans_of_neighbours_are_one() -> None:
    device = get_device()
    whole = Tensor.from_numpy(device, np.zeros((64, 64), np.float32))
    start, end = whole.span
    apart = [whole.rows(0, 16), whole.rows(32, 64), whole.rows(4, 8)]
    assert merged_spans(apart) == [(start, start + 16 * 256), (start + 32 * 256, end)]
    assert merged_spans([*apart, whole.rows(10, 40)]) == [(start, end)]
    assert merged_spans([]) == []
