"""The allocator's free lists, and tensors whose memory is reused, dedicated, staged or refused."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import numpy as np
import pytest

from oazoo.runtime import OutOfDeviceMemoryError, Tensor, get_device
from oazoo.runtime.memory import FreeList


def test_free_list_never_overlaps_and_merges_back() -> None:
    rng = random.Random(7)
    free = FreeList(1000, 1 << 16)
    taken: dict[int, int] = {}
    for _ in range(3000):
        if taken and rng.random() < 0.5:
            offset = rng.choice(list(taken))
            free.give(offset, taken.pop(offset))
        else:
            size = rng.randrange(1, 3000)
            offset = free.take(size)
            if offset is not None:
                assert offset >= 1000 and offset + size <= 1000 + (1 << 16)
                assert all(offset + size <= o or o + s <= offset for o, s in taken.items())
                taken[offset] = size
        assert sum(s for _, s in free.ranges) + sum(taken.values()) == 1 << 16
        assert all(a[0] + a[1] < b[0] for a, b in zip(free.ranges, free.ranges[1:]))
    for offset, size in taken.items():
        free.give(offset, size)
    assert free.is_whole


def test_memory_returns_to_the_driver() -> None:
    device = get_device()
    device.synchronize()
    before = device.allocator.allocated_bytes
    big = [Tensor.from_numpy(device, np.full(3 << 20, i, np.float32)) for i in range(3)]
    assert device.allocator.allocated_bytes == before + 3 * (12 << 20)
    assert [int(t.numpy()[-1]) for t in big] == [0, 1, 2]
    del big
    device.synchronize()
    assert device.allocator.allocated_bytes == before


def test_reused_memory_keeps_order() -> None:
    """A tensor freed while its commands are queued may be overwritten only after they ran."""
    device = get_device()
    ones = Tensor.from_numpy(device, np.ones(4096, np.float32))
    add = device.kernel("add_f32")
    size = add.spec.workgroup_size[0]
    total = Tensor.from_numpy(device, np.zeros(4096, np.float32))
    for _ in range(200):
        step = Tensor.empty(device, (4096,))
        add.dispatch((4096 // size, 1, 1), {"a": ones, "b": ones}, {"y": step}, count=4096)
        add.dispatch((4096 // size, 1, 1), {"a": total, "b": step}, {"y": total}, count=4096)
        del step
    assert np.array_equal(total.numpy(), np.full(4096, 400, np.float32))


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("OAZOO_MEMORY_LIMIT", "1000000", "OAZOO_MEMORY_LIMIT refused"),
        ("OAZOO_MAX_BUFFER_BYTES", "65536", "larger than one buffer"),
        ("OAZOO_MAX_BUFFER_BYTES", "many", "must be a positive number of bytes"),
        ("OAZOO_DEVICE", "99", "no Vulkan device matches"),
        ("OAZOO_DEVICE", "no such gpu", "no Vulkan device matches"),
    ],
)
def test_limits_and_choices_from_the_environment(name: str, value: str, wanted: str) -> None:
    code = (
        "import numpy as np\n"
        "from oazoo.errors import OazooError\n"
        "from oazoo.runtime import Tensor, get_device\n"
        "try:\n"
        "    Tensor.from_numpy(get_device(), np.zeros(3 << 20, np.float32))\n"
        "except OazooError as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, name: value},
        capture_output=True,
        text=True,
        check=True,
    )
    assert wanted in done.stdout


def test_staging_gives_the_same_bytes() -> None:
    """Copies through the staging block (12 MB in 8 MB pieces) return what was written, up and down."""
    code = (
        "import hashlib, numpy as np\n"
        "from oazoo.runtime import Tensor, get_device\n"
        "d = get_device()\n"
        "assert not d.allocator.unified\n"
        "a = np.random.default_rng(3).random(3 << 20, np.float32)\n"
        "t = Tensor.from_numpy(d, a)\n"
        "y = Tensor.empty(d, a.shape)\n"
        "k = d.kernel('add_f32')\n"
        "k.dispatch((-(-a.size // k.spec.workgroup_size[0] // 4), 1, 1), {'a': t, 'b': t}, {'y': y}, count=a.size)\n"
        "assert np.array_equal(t.numpy(), a) and np.array_equal(y.numpy(), a + a)\n"
        "assert np.array_equal(t.rows(5, 9).numpy(), a[5:9])\n"
    )
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "OAZOO_STAGING": "1"}, check=True)


def test_refused_memory_can_be_caught_and_work_goes_on() -> None:
    device = get_device()
    with pytest.raises(OutOfDeviceMemoryError, match="split it by rows"):
        Tensor.empty(device, (1 << 40,), "u8")
    assert Tensor.from_numpy(device, np.arange(5, dtype=np.int32)).numpy().tolist() == [0, 1, 2, 3, 4]
