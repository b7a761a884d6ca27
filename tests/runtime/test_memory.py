"""The allocator's free lists, and tensors whose memory is reused, dedicated, staged or refused."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import numpy as np
import pytest

from oazoo.runtime import OutOfDeviceMemoryError, Tensor, get_device
from oazoo.runtime.memory import Block, FreeList, MemoryChoice, choose_memory


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


GB = 1 << 30
LOCAL, HOST, CACHED, LAZY, PROTECTED, UNCACHED_AMD = 1, 2 | 4, 8, 16, 32, 64 | 128


def test_memory_types_of_many_kinds_of_devices() -> None:
    """Tables as drivers report them, shortened to what decides."""
    window = [(LOCAL, 0), (HOST, 1), (LOCAL | HOST, 2), (HOST | CACHED, 1)]
    # Discrete, with a small host-visible window or all of it visible: staged through cached memory.
    for size in (256 << 20, 8 * GB):
        found = choose_memory(window, [8 * GB, 16 * GB, size], 0b1111, "discrete")
        assert found == MemoryChoice(tensors=0, staging=3, unified=False, readable=False)
    # Type 0 takes images only, as memoryTypeBits says.
    types = [(LOCAL, 0), (LOCAL, 0), (HOST, 1), (HOST | CACHED, 1)]
    found = choose_memory(types, [8 * GB, 16 * GB], 0b1110, "discrete")
    assert found is not None and found.tensors == 1
    # Integrated, with 512 MB set aside: the rest of the memory is where a model fits.
    found = choose_memory(window, [512 << 20, 16 * GB, 256 << 20], 0b1111, "integrated")
    assert found == MemoryChoice(tensors=3, staging=3, unified=True, readable=True)
    # Integrated, one heap, nothing cached: written directly, and read directly too for want of better.
    found = choose_memory([(LOCAL | HOST, 0)], [16 * GB], 1, "integrated")
    assert found == MemoryChoice(tensors=0, staging=0, unified=True, readable=True)
    # Cached memory exists, but apart from the device's own: reads go through it.
    types = [(LOCAL, 0), (LOCAL | HOST, 0), (HOST | CACHED, 1)]
    found = choose_memory(types, [10 * GB, 5 * GB], 0b111, "integrated")
    assert found == MemoryChoice(tensors=1, staging=2, unified=True, readable=False)
    # Special kinds come first and are shunned; OAZOO_STAGING must not fall for protected memory.
    types = [(LOCAL | LAZY, 0), (LOCAL | PROTECTED, 0), (LOCAL | HOST | CACHED, 0)]
    assert choose_memory(types, [8 * GB], 0b111, "integrated") == MemoryChoice(2, 2, True, True)
    assert choose_memory(types, [8 * GB], 0b111, "integrated", staged=True) == MemoryChoice(
        2, 2, False, False
    )
    types = [(LOCAL | UNCACHED_AMD, 0), (LOCAL, 0), (HOST | UNCACHED_AMD, 1), (HOST | CACHED, 1)]
    assert choose_memory(types, [8 * GB, 8 * GB], 0b1111, "discrete") == MemoryChoice(1, 3, False, False)
    assert choose_memory([(LOCAL, 0)], [8 * GB], 1, "discrete") is None


def test_tensors_that_the_host_reads_badly_are_read_through_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    device = get_device()
    tensor = Tensor.from_numpy(device, np.arange(3 << 20, dtype=np.int32))
    monkeypatch.setattr(device.allocator, "readable", False)
    assert np.array_equal(tensor.numpy(), np.arange(3 << 20))


def test_freed_memory_is_waited_for_before_more_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that queued commands may still use is given back before an allocation fails for want of it."""
    device = get_device()
    device.synchronize()
    ones = Tensor.from_numpy(device, np.ones(4 << 20, np.float32))
    total = Tensor.empty(device, ones.shape)
    groups = -(-ones.numel // 256)
    device.kernel("add_f32").dispatch((groups, 1, 1), {"a": ones, "b": ones}, {"y": total}, count=ones.numel)
    del ones
    allocator = device.allocator
    assert len(allocator._graveyard) == 1
    create = allocator._new_block

    def full(size: int) -> Block:
        if allocator._graveyard:
            raise OutOfDeviceMemoryError("full")
        return create(size)

    monkeypatch.setattr(allocator, "_new_block", full)
    more = Tensor.empty(device, (4 << 20,))
    assert not allocator._graveyard
    assert more.numel == total.numel
    assert total.numpy()[-1] == 2


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
        # A small write lies within the commands: behind what was queued before, and before what comes after.
        "t.rows(6, 8).write(np.ones(2, np.float32))\n"
        "k.dispatch((1, 1, 1), {'a': t, 'b': t}, {'y': y}, count=8)\n"
        "t.rows(6, 7).write(np.full(1, 7, np.float32))\n"
        "assert y.numpy()[:9].tolist() == [*(a + a)[:6].tolist(), 2, 2, (a + a)[8]]\n"
        "assert t.rows(5, 9).numpy().tolist() == [a[5], 7, 1, a[8]]\n"
        "b = Tensor.from_numpy(d, np.arange(7, dtype=np.uint8))\n"
        "b.rows(3, 4).write(np.zeros(1, np.uint8))\n"
        "assert b.numpy().tolist() == [0, 1, 2, 0, 4, 5, 6]\n"
    )
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "OAZOO_STAGING": "1"}, check=True)


def test_refused_memory_can_be_caught_and_work_goes_on() -> None:
    device = get_device()
    with pytest.raises(OutOfDeviceMemoryError, match="split it by rows"):
        Tensor.empty(device, (1 << 40,), "u8")
    assert Tensor.from_numpy(device, np.arange(5, dtype=np.int32)).numpy().tolist() == [0, 1, 2, 3, 4]
