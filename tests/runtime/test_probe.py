"""The probe tells a machine without a loader from one without a driver, without a device, or without permission."""

from __future__ import annotations

import ctypes
import grp
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from oazoo.runtime import probe as module
from oazoo.runtime.probe import (
    Driver,
    Probe,
    RenderNode,
    manifest_paths,
    read_driver,
    render_nodes,
    run_probe,
)


def run(code: str = "", **environ: str) -> Probe:
    """The probe in a process of its own, after ``code``."""
    script = f"import sys\n{code}\nfrom oazoo.runtime.probe import main\nsys.exit(main([]))"
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, **environ}, capture_output=True, text=True
    )
    assert done.returncode in (0, 1), done.stderr
    found = module.from_json(json.loads(done.stdout))
    assert found.usable == (done.returncode == 0)
    return found


def test_this_machine_has_a_device_that_opens() -> None:
    found = run_probe()
    assert found.usable and found.device is not None
    assert found.detail == found.device["name"]
    assert found.reason
    assert found.loader is not None and found.drivers
    assert {"bufferDeviceAddress", "timelineSemaphore"} <= set(found.device["features"])


def test_no_loader() -> None:
    found = run("sys.modules['vulkan'] = None")
    assert found.code == "no-loader"
    assert found.loader is None and not found.devices


def test_loader_library_hidden_from_the_linker() -> None:
    # The real package, with a linker that finds no libvulkan.
    code = (
        "import vulkan._vulkancache as c\n"
        "class Ffi:\n"
        "    def __getattr__(self, name): return getattr(real, name)\n"
        "    def dlopen(self, name, *a): raise OSError(name)\n"
        "real = c.ffi\n"
        "c.ffi = Ffi()\n"
    )
    done = run(
        "import importlib.util, types\n"
        "spec = importlib.util.find_spec('vulkan')\n"
        "package = types.ModuleType('vulkan'); package.__path__ = list(spec.submodule_search_locations)\n"
        "sys.modules['vulkan'] = package\n" + code
    )
    assert done.code == "no-loader"


@pytest.mark.parametrize("variable", ["VK_DRIVER_FILES", "VK_ICD_FILENAMES"])
def test_no_driver(variable: str, tmp_path: Path) -> None:
    cleared = {"VK_DRIVER_FILES": "", "VK_ICD_FILENAMES": "", "VK_ADD_DRIVER_FILES": ""}
    found = run(**{**cleared, variable: str(tmp_path / "nothing.json")})
    assert found.code == "no-driver"
    assert found.loader_version is not None and found.drivers == []


def test_a_driver_whose_library_is_missing(tmp_path: Path) -> None:
    manifest = tmp_path / "ghost.json"
    icd = {"library_path": "./libvulkan_ghost.so", "api_version": "1.3.0"}
    manifest.write_text(json.dumps({"file_format_version": "1.0.0", "ICD": icd}))
    found = run(VK_DRIVER_FILES=str(manifest))
    assert found.code == "no-device"
    assert "libvulkan_ghost.so" in found.detail
    assert found.drivers[0].problem is not None


def test_a_name_that_no_device_has() -> None:
    found = run(OAZOO_DEVICE="no such device")
    assert found.code == "no-match"
    assert "no such device" in found.detail
    assert found.devices


def test_a_chosen_device_says_why() -> None:
    name = run_probe().detail
    found = run(OAZOO_DEVICE=name[:6])
    assert found.usable
    assert found.reason == f"OAZOO_DEVICE={name[:6]} names it"


def test_a_driver_that_crashes_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Any way in which the child process dies stands for a driver that takes it down.
    source = tmp_path / "sitecustomize.py"
    source.write_text("import os, sys\nif 'oazoo.runtime.probe' in ' '.join(sys.orig_argv): os.abort()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = run_probe()
    assert found.code == "driver-failed"
    assert "signal 6" in found.detail


def test_a_driver_that_hangs_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "sitecustomize.py"
    source.write_text(
        "import sys, time\nif 'oazoo.runtime.probe' in ' '.join(sys.orig_argv): time.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(module, "_PATIENCE", 0.5)
    found = run_probe()
    assert found.code == "driver-failed"
    assert "no answer" in found.detail


def test_brief_is_one_line_of_fields() -> None:
    command = [sys.executable, "-m", "oazoo.runtime.probe", "--brief"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0
    status, name, kind, driver = done.stdout.rstrip("\n").split("\t")
    assert status == "usable" and name and kind and driver
    broken = subprocess.run(command, env={**os.environ, "OAZOO_DEVICE": "?"}, capture_output=True, text=True)
    assert broken.returncode == 1
    assert broken.stdout.startswith("no-match\t") and broken.stdout.count("\n") == 1


def manifest_at(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('{"ICD": {"library_path": "libx.so", "api_version": "1.0"}}')
    return path


def test_manifests_are_found_where_the_loader_looks(tmp_path: Path) -> None:
    home = manifest_at(tmp_path / "home/.config/vulkan/icd.d/a.json")
    data = manifest_at(tmp_path / "share/vulkan/icd.d/b.json")
    added = manifest_at(tmp_path / "added.json")
    environ = {
        "HOME": str(tmp_path / "home"),
        "XDG_CONFIG_DIRS": str(tmp_path / "none"),
        "XDG_DATA_DIRS": str(tmp_path / "share"),
        "VK_ADD_DRIVER_FILES": str(added),
    }
    ours = [path for path in manifest_paths(environ) if tmp_path in path.parents]
    assert ours == [added, home, data]
    # The newer variable hides the older one and the search, and takes folders too.
    chosen = {**environ, "VK_DRIVER_FILES": f"{data.parent}:{home}", "VK_ICD_FILENAMES": str(added)}
    del chosen["VK_ADD_DRIVER_FILES"]
    assert manifest_paths(chosen) == [data, home]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"ICD": 3}', '{"ICD": {}}', "\x00\x01"])
def test_a_broken_manifest_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    driver = read_driver(path)
    assert driver.problem is not None and driver.problem.startswith("the manifest cannot be read")


def test_a_manifest_names_its_library_relative_to_itself(tmp_path: Path) -> None:
    vulkan = module.run_probe().loader
    assert vulkan is not None
    link = tmp_path / "libreal.so"
    link.symlink_to(vulkan)
    manifest = tmp_path / "real.json"
    manifest.write_text('{"ICD": {"library_path": "./libreal.so", "api_version": "1.3.0"}}')
    assert read_driver(manifest) == Driver(str(manifest), "./libreal.so", "1.3.0", None)
    assert ctypes.CDLL(str(link))


def test_render_nodes_and_permission(tmp_path: Path) -> None:
    node = tmp_path / "renderD128"
    node.touch()
    (tmp_path / "card0").touch()
    (found,) = render_nodes(tmp_path)
    assert found.path == str(node) and found.accessible
    assert found.group == grp.getgrgid(node.stat().st_gid).gr_name


@pytest.mark.parametrize(
    ("drivers", "nodes", "code"),
    [
        ([], [], "no-driver"),
        ([Driver("radeon.json", "lib.so", "1.3", None)], [], "no-device"),
        (
            [Driver("r.json", "lib.so", "1.3", None)],
            [RenderNode("/dev/dri/renderD128", True, "render")],
            "no-device",
        ),
        (
            [Driver("r.json", "lib.so", "1.3", None)],
            [RenderNode("/dev/dri/renderD128", False, "render")],
            "no-permission",
        ),
    ],
)
def test_no_device_has_its_reasons(drivers: list[Driver], nodes: list[RenderNode], code: str) -> None:
    found, detail = module._without_devices(drivers, nodes, "")
    assert found == code
    assert detail.startswith(module.PROBLEMS[code])
