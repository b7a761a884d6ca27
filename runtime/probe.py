"""Look at this machine's Vulkan: loader, drivers, devices, and whether one really opens.

``python -m oazoo.runtime.probe`` prints what it finds as JSON; ``--brief`` prints one line of tab-separated
fields for scripts: ``usable``, name, kind and driver, or a code of :data:`PROBLEMS` and what is wrong. Exit
status 0 when a device is usable, 1 otherwise. A driver is foreign code that may take its process down with
it, so callers that must survive run this as a process of its own: :func:`run_probe`.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from oazoo.errors import DeviceError, UsageError

#: Why no device is usable, by code.
PROBLEMS = {
    "no-loader": "the Vulkan loader library (libvulkan) is missing",
    "no-driver": "the Vulkan loader is there, but no driver is installed",
    "no-device": "Vulkan drivers are installed, but none of them finds a device",
    "no-permission": "a GPU is there, but this user may not open it",
    "unsuitable": "Vulkan devices answer, but none has what oazoo needs",
    "no-match": "OAZOO_DEVICE names no device of this machine",
    "driver-failed": "the Vulkan driver failed",
}
#: Seconds after which a driver that does not answer counts as failed.
_PATIENCE = 60.0


@dataclass(frozen=True)
class Driver:
    """A driver's manifest (ICD file). ``problem`` says why its library cannot be loaded, or is None."""

    manifest: str
    library: str
    api_version: str
    problem: str | None


@dataclass(frozen=True)
class RenderNode:
    """A GPU's device file under ``/dev/dri``."""

    path: str
    accessible: bool
    group: str


@dataclass(frozen=True)
class Probe:
    """What was found. ``code`` is ``usable`` or a key of :data:`PROBLEMS`, ``detail`` puts it in words.

    ``devices`` are the fields of :class:`oazoo.runtime.instance.DeviceInfo`; ``chosen`` is the index of the
    one that the runtime would open, and ``reason`` says why that one.
    """

    code: str
    detail: str
    loader: str | None = None
    loader_version: str | None = None
    drivers: list[Driver] = field(default_factory=list)
    nodes: list[RenderNode] = field(default_factory=list)
    devices: list[dict[str, Any]] = field(default_factory=list)
    chosen: int | None = None
    reason: str = ""
    layers: list[str] = field(default_factory=list)

    @property
    def usable(self) -> bool:
        """True when the runtime can open a device."""
        return self.code == "usable"

    @property
    def device(self) -> dict[str, Any] | None:
        """The chosen device."""
        return next((d for d in self.devices if d["index"] == self.chosen), None)


# ------------------------------------------------------------------------------------- what the system offers


def manifest_paths(environ: Mapping[str, str]) -> list[Path]:
    """The driver manifests that the Vulkan loader reads on Linux, in its order (see the loader's interface
    document).

    ``VK_DRIVER_FILES``, or the older ``VK_ICD_FILENAMES``, replaces the search; each of its entries is a file
    or a folder. ``VK_ADD_DRIVER_FILES`` adds to it.
    """
    listed = environ.get("VK_DRIVER_FILES") or environ.get("VK_ICD_FILENAMES")
    added = environ.get("VK_ADD_DRIVER_FILES", "")
    paths = [Path(entry) for entry in added.split(":") if entry]
    if listed:
        paths += [Path(entry) for entry in listed.split(":") if entry]
    else:
        paths += [folder / "vulkan" / "icd.d" for folder in _search_folders(environ)]
    found: list[Path] = []
    for path in paths:
        for manifest in sorted(path.glob("*.json")) if path.is_dir() else [path]:
            if manifest.is_file() and manifest not in found:
                found.append(manifest)
    return found


def _search_folders(environ: Mapping[str, str]) -> list[Path]:
    home = Path(environ.get("HOME") or "/nonexistent")
    config = environ.get("XDG_CONFIG_HOME") or str(home / ".config")
    data = environ.get("XDG_DATA_HOME") or str(home / ".local/share")
    configs = environ.get("XDG_CONFIG_DIRS") or "/etc/xdg"
    datas = environ.get("XDG_DATA_DIRS") or "/usr/local/share:/usr/share"
    folders = [config, *configs.split(":"), "/usr/local/etc", "/etc", data, *datas.split(":")]
    return [Path(folder) for folder in folders if folder]


def read_driver(manifest: Path, load: bool = True) -> Driver:
    """Read one manifest; with ``load``, also try to open the library it names."""
    try:
        icd = json.loads(manifest.read_text("utf-8"))["ICD"]
        library, version = str(icd["library_path"]), str(icd.get("api_version", ""))
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Driver(str(manifest), "", "", f"the manifest cannot be read: {error}")
    problem = None
    if load:
        # A path with a folder is relative to the manifest, a bare name is looked up by the dynamic linker.
        target = str(manifest.parent / library) if "/" in library else library
        try:
            ctypes.CDLL(target)
        except OSError as error:
            problem = str(error)
    return Driver(str(manifest), library, version, problem)


def render_nodes(folder: Path = Path("/dev/dri")) -> list[RenderNode]:
    """The GPUs' render nodes, and whether this user may open them."""
    nodes = []
    for path in sorted(folder.glob("renderD*")):
        try:
            import grp

            group = grp.getgrgid(path.stat().st_gid).gr_name
        except (ImportError, OSError, KeyError):
            group = ""
        nodes.append(RenderNode(str(path), os.access(path, os.R_OK | os.W_OK), group))
    return nodes


def _loader_path(name: str) -> str:
    """Where the loader that is now open lies; its bare name when the system does not tell."""
    try:
        for line in Path("/proc/self/maps").read_text().splitlines():
            if name in line:
                return line.split(maxsplit=5)[5]
    except OSError:
        pass
    return name


# -------------------------------------------------------------------------------------------------- the probe


def probe(environ: Mapping[str, str] | None = None) -> Probe:
    """Look at Vulkan from inside this process, and open the chosen device once. Never raises for what it may
    find.
    """
    environ = os.environ if environ is None else environ
    from oazoo.runtime.instance import choose, get_instance
    from oazoo.runtime.vk import VulkanUnavailableError, load

    nodes = render_nodes()
    manifests = manifest_paths(environ)
    try:
        vk = load()
    except VulkanUnavailableError:
        drivers = [read_driver(path, load=False) for path in manifests]
        return Probe("no-loader", PROBLEMS["no-loader"], drivers=drivers, nodes=nodes)
    version = vk.ffi.new("uint32_t *", 1 << 22)
    vk.lib.vkEnumerateInstanceVersion(version)
    common: dict[str, Any] = {
        "loader": _loader_path("libvulkan.so.1"),
        "loader_version": f"{version[0] >> 22}.{version[0] >> 12 & 0x3FF}.{version[0] & 0xFFF}",
        "nodes": nodes,
        "layers": _layers(vk),
    }
    try:
        devices = [info for _, info in get_instance().physical_devices()]
    except DeviceError as error:
        drivers = [read_driver(path) for path in manifests]
        code, detail = _without_devices(drivers, nodes, str(error))
        return Probe(code, detail, drivers=drivers, **common)
    common["drivers"] = drivers = [read_driver(path) for path in manifests]
    if not devices:
        code, detail = _without_devices(drivers, nodes, "")
        return Probe(code, detail, **common)
    common["devices"] = [{**asdict(info), "features": sorted(info.features)} for info in devices]
    wanted = environ.get("OAZOO_DEVICE") or None
    try:
        chosen = choose(devices, wanted)
    except UsageError as error:
        return Probe("no-match", str(error), **common)
    except DeviceError as error:
        return Probe("unsuitable", str(error), **common)
    common["chosen"] = chosen.index
    if wanted:
        common["reason"] = f"OAZOO_DEVICE={wanted} names it"
    elif len(devices) == 1:
        common["reason"] = "the only device"
    else:
        common["reason"] = f"the first usable {chosen.kind} device; order: discrete, integrated, virtual, cpu"
    try:
        _open_once(chosen.index)
    except DeviceError as error:
        return Probe("driver-failed", f"{chosen.name} answers but does not open: {error}", **common)
    return Probe("usable", chosen.name, **common)


def _without_devices(drivers: list[Driver], nodes: list[RenderNode], words: str) -> tuple[str, str]:
    """The code and the words for a machine whose loader shows no device."""
    closed = [node for node in nodes if not node.accessible]
    if not drivers:
        return "no-driver", PROBLEMS["no-driver"]
    if closed:
        return "no-permission", f"{PROBLEMS['no-permission']}: {', '.join(node.path for node in closed)}"
    broken = [driver for driver in drivers if driver.problem is not None]
    if len(broken) == len(drivers):
        reasons = "; ".join(f"{driver.manifest}: {driver.problem}" for driver in broken)
        return "no-device", f"{PROBLEMS['no-device']}; no driver's library can be loaded ({reasons})"
    return "no-device", PROBLEMS["no-device"] + (f" ({words})" if words and not drivers else "")


def _layers(vk: Any) -> list[str]:
    from oazoo.runtime.vk import enumerate_all

    array, count = enumerate_all("vkEnumerateInstanceLayerProperties", "VkLayerProperties")
    return sorted(vk.ffi.string(array[i].layerName).decode("utf-8", "replace") for i in range(count))


def _open_once(index: int) -> None:
    """Open the device as the runtime does, and close it again."""
    from oazoo.runtime.instance import create_device, get_instance
    from oazoo.runtime.vk import load

    vk = load()
    physical, info = get_instance().physical_devices()[index]
    device, _ = create_device(vk, physical, info)
    vk.lib.vkDestroyDevice(device, vk.ffi.NULL)


# ------------------------------------------------------------------------------------ as a process of its own


def run_probe() -> Probe:
    """Run :func:`probe` in a child process, so that a driver that crashes or hangs is a finding and not our
    end.
    """
    command = [sys.executable, "-m", "oazoo.runtime.probe"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        return _failed(f"no answer within {_PATIENCE:.0f} s")
    try:
        return from_json(json.loads(done.stdout))
    except (ValueError, TypeError, KeyError):
        words = done.stderr.strip().splitlines()
        how = (
            f"died of signal {-done.returncode}" if done.returncode < 0 else f"exit status {done.returncode}"
        )
        return _failed(f"{how}: {words[-1]}" if words else how)


def _failed(how: str) -> Probe:
    drivers = [read_driver(path, load=False) for path in manifest_paths(os.environ)]
    return Probe(
        "driver-failed", f"{PROBLEMS['driver-failed']} ({how})", drivers=drivers, nodes=render_nodes()
    )


def from_json(data: dict[str, Any]) -> Probe:
    """A :class:`Probe` from what the command line of this module prints."""
    fields = dict(data)
    fields["drivers"] = [Driver(**driver) for driver in fields["drivers"]]
    fields["nodes"] = [RenderNode(**node) for node in fields["nodes"]]
    return Probe(**fields)


def main(arguments: list[str]) -> int:
    """``python -m oazoo.runtime.probe [--brief]``."""
    if "--brief" in arguments:
        found = run_probe()
        device = found.device
        if found.usable and device is not None:
            print("usable", device["name"], device["kind"], device["driver"], sep="\t")
        else:
            print(found.code, " ".join(found.detail.split()), sep="\t")
    else:
        found = probe()
        print(json.dumps(asdict(found), indent=2))
    return 0 if found.usable else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
