"""Tensors, recording, barriers, capture and replay, kernels and their cache, device choice, and the way errors are told."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest

from oazoo.errors import DeviceError, UsageError
from oazoo.runtime import (
    Device,
    DeviceLostError,
    Tensor,
    get_device,
    list_devices,
    open_ahead,
    validation_messages,
)
from oazoo.runtime.instance import DeviceInfo, choose, create_device, get_instance
from oazoo.runtime.ops.common import eight_lanes, lanes, portable_only
from oazoo.runtime.recording import Hazards
from oazoo.runtime.tensor import encoded_bytes
from oazoo.runtime.vk import load


def add(a: Tensor, b: Tensor, y: Tensor) -> None:
    kernel = a.device.kernel("add_f32")
    groups = -(-a.numel // kernel.spec.workgroup_size[0])
    kernel.dispatch((groups, 1, 1), {"a": a, "b": b}, {"y": y}, count=a.numel)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int32, np.uint32, np.uint8])
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (7, 5), (2, 3, 4, 5)])
def test_values_survive_the_round_trip(dtype: type, shape: tuple[int, ...]) -> None:
    device = get_device()
    array = np.random.default_rng(1).integers(0, 200, shape).astype(dtype)
    tensor = Tensor.from_numpy(device, array)
    assert tensor.numpy().dtype == array.dtype
    assert np.array_equal(tensor.numpy(), array)
    assert tensor.nbytes == array.nbytes


def test_sizes_of_block_encodings_follow_the_format() -> None:
    # oam.md: B = ceil(n / 32) blocks of 16 or 32 code bytes and one float32 scale.
    assert encoded_bytes((3, 33), "q4") == 4 * 20
    assert encoded_bytes((3, 33), "q8") == 4 * 36
    assert encoded_bytes((1, 31), "q8") == 36
    with pytest.raises(DeviceError, match="no tensors of type 'q5'"):
        encoded_bytes((1,), "q5")


def test_bytes_of_another_length_are_refused() -> None:
    with pytest.raises(DeviceError, match="which takes 40"):
        Tensor.from_bytes(get_device(), (64,), "q4", b"\0" * 39)
    with pytest.raises(DeviceError, match="say dtype="):
        Tensor.from_numpy(get_device(), np.zeros(3))


def test_views_share_memory() -> None:
    device = get_device()
    tensor = Tensor.from_numpy(device, np.arange(24, dtype=np.float32).reshape(6, 4))
    part = tensor.rows(2, 4)
    part.write(np.full((2, 4), -1, np.float32))
    expected = np.arange(24, dtype=np.float32).reshape(6, 4)
    expected[2:4] = -1
    assert np.array_equal(tensor.numpy(), expected)
    assert np.array_equal(tensor.view(3, 8).numpy(), expected.reshape(3, 8))
    with pytest.raises(DeviceError, match="not within"):
        tensor.rows(3, 7)
    with pytest.raises(DeviceError, match="24 elements"):
        tensor.view(5, 5)


def test_hazards() -> None:
    hazards = Hazards()
    assert not hazards.conflict([(0, 10)], [(10, 20)])
    assert not hazards.conflict([(0, 10)], [(20, 30)])  # reads of the same may run together
    assert hazards.conflict([(15, 16)], [(40, 50)])  # read after write
    assert not hazards.conflict([(0, 10)], [(10, 12)])  # the barrier before covered the earlier write
    assert hazards.conflict([], [(5, 6)])  # write after read
    assert hazards.conflict([], [(5, 7)])  # write after write


def test_independent_commands_need_no_barrier() -> None:
    device = get_device()
    inputs = [Tensor.from_numpy(device, np.full(64, i, np.float32)) for i in range(4)]
    outputs = [Tensor.empty(device, (64,)) for _ in range(4)]
    with device.capture() as program:
        for i in range(4):
            add(inputs[i], inputs[0], outputs[i])
        total = Tensor.empty(device, (64,))
        add(outputs[1], outputs[2], total)
    assert program.commands == 5
    assert program.recording.barriers == 2  # the one at the start, and one before the sum
    program.run()
    assert np.array_equal(total.numpy(), np.full(64, 3, np.float32))


def test_a_program_replays_with_new_values_and_keeps_its_tensors() -> None:
    device = get_device()
    source = Tensor.from_numpy(device, np.zeros(1000, np.float32))
    one = Tensor.from_numpy(device, np.ones(1000, np.float32))
    with device.capture() as program:
        first = Tensor.empty(device, (1000,))
        add(source, one, first)
        second = Tensor.empty(device, (1000,))
        add(first, one, second)
        del first
        third = Tensor.empty(device, (1000,))  # takes the memory of the first
        add(second, source, third)
        del second
    del one
    junk = [Tensor.from_numpy(device, np.full(1000, 1e9, np.float32)) for _ in range(8)]
    for i in range(6):
        source.write(np.full(1000, i, np.float32))
        program.run()
        assert np.array_equal(third.numpy(), np.full(1000, 2 * i + 2, np.float32))
    del program
    assert third.numpy()[0] == 12  # the result outlives the program
    assert all(t.numpy()[0] == 1e9 for t in junk)


def test_queued_replays_run_in_order() -> None:
    device = get_device()
    total = Tensor.from_numpy(device, np.zeros(100, np.float32))
    one = Tensor.from_numpy(device, np.ones(100, np.float32))
    with device.capture() as program:
        add(total, one, total)
    for _ in range(50):
        program.run()
    add(total, total, total)
    program.run()
    assert np.array_equal(total.numpy(), np.full(100, 101, np.float32))


def test_what_a_capture_forbids() -> None:
    device = get_device()
    tensor = Tensor.from_numpy(device, np.zeros(4, np.float32))
    with pytest.raises(DeviceError, match="cannot be read"), device.capture() as program:
        tensor.numpy()
    with pytest.raises(DeviceError, match="did not finish"):
        program.run()
    with pytest.raises(DeviceError, match="cannot be written"), device.capture():
        tensor.write(np.ones(4, np.float32))
    with pytest.raises(DeviceError, match="do not nest"), device.capture(), device.capture():
        pass
    assert not device.capturing
    assert tensor.numpy().tolist() == [0, 0, 0, 0]


def test_wrong_kernel_arguments_are_told() -> None:
    device = get_device()
    tensor = Tensor.from_numpy(device, np.zeros(4, np.float32))
    kernel = device.kernel("add_f32")
    with pytest.raises(DeviceError, match="are not its"):
        kernel.dispatch((1, 1, 1), {"a": tensor}, {"y": tensor}, count=4)
    with pytest.raises(DeviceError, match="more than the device"):
        kernel.dispatch((2**31, 1, 1), {"a": tensor, "b": tensor}, {"y": tensor}, count=4)
    with pytest.raises(DeviceError, match="there is no kernel 'nothing'"):
        device.kernel("nothing")


def test_device_choice() -> None:
    base = list_devices()[0]
    cpu = replace(base, index=0, name="llvmpipe", kind="cpu", uuid="00" * 16, problem=None)
    igpu = replace(cpu, index=1, name="Some Integrated", kind="integrated", uuid="11" * 16)
    gpu = replace(cpu, index=2, name="Some Discrete", kind="discrete", uuid="22" * 16)
    old = replace(gpu, index=3, name="Old Discrete", problem="no bufferDeviceAddress", uuid="33" * 16)
    devices = [cpu, igpu, gpu, old]
    assert choose(devices, None) is gpu
    assert choose([cpu, igpu], "") is igpu
    assert choose(devices, "cpu") is cpu
    assert choose(devices, "1") is igpu
    assert choose(devices, "integ") is igpu
    assert choose(devices, "22222222-2222-2222-2222-222222222222") is gpu
    with pytest.raises(UsageError, match="more than one"):
        choose(devices, "some")
    with pytest.raises(DeviceError, match="no bufferDeviceAddress"):
        choose(devices, "old")
    with pytest.raises(UsageError, match="there are 0: llvmpipe"):
        choose([cpu], "radeon")
    with pytest.raises(DeviceError, match="no Vulkan device answers"):
        choose([], None)
    with pytest.raises(DeviceError, match="can be used"):
        choose([old], None)


def test_submissions_are_bounded_by_their_work() -> None:
    device = get_device()
    device.synchronize()
    x = Tensor.from_numpy(device, np.ones(64, np.float32))
    sent = device.submitted
    kernel = device.kernel("add_f32")
    for _ in range(6):
        kernel.dispatch((1, 1, 1), {"a": x, "b": x}, {"y": x}, work=1 << 32, count=64)
    assert device.submitted == sent + 3
    assert np.array_equal(x.numpy(), np.full(64, 64, np.float32))


def test_a_device_need_not_have_been_closed_by_the_end() -> None:
    code = (
        "import sys\n"
        "from oazoo.runtime import Device, validation_messages\n"
        "import atexit\n"
        "atexit.register(lambda: print(len(devices), [d.closed for d in devices]))\n"
        "devices = [Device.open('cpu'), Device.open('cpu')]\n"
        "devices[1].close()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "2 [True, True]"


def test_layered_drivers_are_told_that_their_gaps_are_known() -> None:
    """VK_KHR_portability_subset is enabled when, and only when, the device has it (MoltenVK); here a device pretends."""
    vk = load()
    physical, info = get_instance().physical_devices()[get_device().info.index]
    seen: list[list[bytes]] = []

    class Watched:
        def __getattr__(self, name: str) -> object:
            return self._create if name == "vkCreateDevice" else getattr(vk.lib, name)

        def _create(self, handle: object, create: Any, *rest: object) -> int:
            names = [create.ppEnabledExtensionNames[i] for i in range(create.enabledExtensionCount)]
            seen.append([vk.ffi.string(name) for name in names])
            return -7

    class Api:
        lib = Watched()

        def __getattr__(self, name: str) -> object:
            return getattr(vk, name)

    for present in (False, True):
        with pytest.raises(DeviceError, match="extension not present"):
            create_device(Api(), physical, replace(info, portability_subset=present))
    assert seen == [[], [b"VK_KHR_portability_subset"]]


def test_kernels_for_processors_need_their_subgroups() -> None:
    info = replace(get_device().info, kind="cpu", subgroup_size=8, subgroup_exchange=True)
    fits = [info, replace(info, features=frozenset())]
    misfits = [
        replace(info, subgroup_exchange=False),
        replace(info, subgroup_size=4),
        replace(info, kind="discrete"),
    ]

    class Some:
        def __init__(self, info: DeviceInfo) -> None:
            self.info = info

    wave = "group32" if portable_only() else "wave8"
    assert [lanes(cast(Device, Some(i))) for i in fits] == [wave, wave]
    assert [lanes(cast(Device, Some(i))) for i in misfits] == ["group32"] * 3
    assert not any(eight_lanes(cast(Device, Some(i))) for i in [fits[1], *misfits])


def test_a_lost_device_is_an_error_of_its_own() -> None:
    """A submit that returns VK_ERROR_DEVICE_LOST raises; what follows on a fresh device works."""
    device = Device.open(os.environ.get("OAZOO_DEVICE"))
    tensor = Tensor.from_numpy(device, np.ones(4, np.float32))
    device.synchronize()

    class LosingLibrary:
        def __init__(self, lib: object) -> None:
            self._lib = lib

        def __getattr__(self, name: str) -> object:
            return (lambda *_: -4) if name == "vkQueueSubmit" else getattr(self._lib, name)

    class LosingApi:
        lib, ffi = LosingLibrary(device._vk.lib), device._vk.ffi

    real, device._vk = device._vk, LosingApi()
    add(tensor, tensor, tensor)
    with pytest.raises(DeviceLostError, match="was lost"):
        tensor.numpy()
    device._vk = real
    del tensor
    device.close()
    with pytest.raises(DeviceError, match="is closed"):
        device.kernel("add_f32") and device._current()


def test_pipeline_cache_survives_damage_and_a_read_only_folder(tmp_path: Path) -> None:
    code = (
        "import numpy as np\n"
        "from oazoo.runtime import Tensor, get_device\n"
        "d = get_device()\n"
        "t = Tensor.from_numpy(d, np.ones(100, np.float32))\n"
        "d.kernel('add_f32').dispatch((2, 1, 1), {'a': t, 'b': t}, {'y': t}, count=100)\n"
        "assert t.numpy()[0] == 2\n"
        "print(d.pipeline_cache.path, len(d.pipeline_cache._loaded))\n"
    )

    def start(home: Path) -> tuple[Path, int]:
        env = {**os.environ, "OAZOO_HOME": str(home)}
        out = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        ).stdout
        path, size = out.rsplit(maxsplit=1)
        return Path(path), int(size)

    path, size = start(tmp_path)
    assert size == 0
    if path.exists():  # a driver may have nothing worth keeping
        assert start(tmp_path)[1] == path.stat().st_size - 32
        damaged = bytearray(path.read_bytes())
        damaged[len(damaged) // 2] ^= 0xFF
        path.write_bytes(damaged)
        assert start(tmp_path)[1] == 0
    assert start(Path("/proc/no-such-home"))[1] == 0


def test_without_a_loader_or_a_driver_the_error_says_what_to_do() -> None:
    code = (
        "from oazoo.errors import OazooError\n"
        "from oazoo.runtime import get_device\n"
        "try:\n"
        "    get_device()\n"
        "except OazooError as error:\n"
        "    print(error)\n"
    )
    env = {**os.environ, "VK_DRIVER_FILES": "/nonexistent.json", "VK_ICD_FILENAMES": "/nonexistent.json"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert "VK_DRIVER_FILES limits the search to /nonexistent.json: unset it" in done.stdout
    hidden = "import sys; sys.modules['vulkan'] = None\n" + code
    done = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, check=True)
    assert "libvulkan1" in done.stdout


def test_the_validation_layer_speaks_through_the_messenger() -> None:
    """A call that is wrong on purpose must show up, or silence would prove nothing."""
    if os.environ.get("OAZOO_VALIDATION", "") in ("", "0"):
        assert validation_messages() == []
        return
    code = (
        "from oazoo.runtime import get_device, validation_messages\n"
        "from oazoo.runtime.vk import struct\n"
        "d = get_device()\n"
        "i = struct('VkBufferCreateInfo', 12, size=0, usage=1)\n"
        "h = d._vk.ffi.new('VkBuffer *')\n"
        "d._vk.lib.vkCreateBuffer(d.handle, i, d._vk.ffi.NULL, h)\n"
        "print(validation_messages())\n"
    )
    # Its message is wanted, so it stays out of the log in which the run looks for unwanted ones.
    env = {**os.environ, "OAZOO_VALIDATION_LOG": ""}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert "VUID-VkBufferCreateInfo-size-00912" in done.stdout


def test_a_device_opened_ahead_is_the_one_that_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    get_device()
    monkeypatch.setattr("oazoo.runtime.device._default", None)
    open_ahead()
    device = get_device()
    try:
        assert get_device() is device
        assert Tensor.from_numpy(device, np.arange(4, dtype=np.int32)).numpy().tolist() == [0, 1, 2, 3]
    finally:
        device.close()


def test_what_goes_wrong_ahead_is_told_when_the_device_is_wanted(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr("oazoo.runtime.device._default", None)
    monkeypatch.setenv("OAZOO_DEVICE", "no such device")
    open_ahead()
    with pytest.raises(UsageError, match="no such device"):
        get_device()
    assert not recwarn.list  # such as pytest's, of an exception that ended a thread
