"""Device time of captured programs, by the device's own clock."""

from __future__ import annotations

import time

import numpy as np

from oazoo.runtime import Device, Tensor, get_device
from oazoo.runtime.ops import linear


def _program(device: Device, products: int, timed: bool = True) -> tuple[float | None, float]:
    """Device and wall seconds of a replay with so many matrix products."""
    x = Tensor.from_numpy(device, np.ones((128, 256), np.float32))
    w = Tensor.from_numpy(device, np.ones((256, 256), np.float32))
    with device.capture(timed=timed) as program:
        for _ in range(products):
            linear(x, w)
    assert program.seconds() is None
    program.run()
    device.synchronize()
    start = time.perf_counter()
    program.run()
    device.synchronize()
    return program.seconds(), time.perf_counter() - start


def test_device_time_lies_within_wall_time() -> None:
    device = get_device()
    few, wall_few = _program(device, 1)
    many, wall_many = _program(device, 64)
    if few is None or many is None:  # a queue without timestamps says so for all programs
        assert few is None and many is None
        return
    assert 0 < few < wall_few and 0 < many < wall_many
    assert many > 4 * few
    # Nearly all of a long program is work of the device.
    assert many > 0.5 * wall_many


def test_only_where_it_is_asked_for() -> None:
    assert _program(get_device(), 1, timed=False)[0] is None


def test_a_device_closed_under_its_programs() -> None:
    """Nothing is left behind; the validation layer, where it is on, would say so."""
    device = Device.open()
    x = Tensor.from_numpy(device, np.ones((4, 8), np.float32))
    with device.capture(timed=True) as program:
        linear(x, Tensor.empty(device, (8, 8)))
    program.run()
    device.close()
    del program
