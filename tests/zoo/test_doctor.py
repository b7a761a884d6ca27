"""`oazoo doctor` tells what is missing and the command that mends it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oazoo.runtime.probe import PROBLEMS, Driver, Probe, RenderNode, run_probe
from oazoo.runtime.stress import Stress
from oazoo.zoo.doctor import (
    Finding,
    check_packages,
    examine,
    explain,
    install_command,
    judge,
    judge_stress,
    read_os_release,
)

DEBIAN_13 = {"ID": "debian", "VERSION_CODENAME": "trixie"}
RADEON = Driver("/usr/share/vulkan/icd.d/radeon_icd.json", "libvulkan_radeon.so", "1.3", None)
LAVAPIPE = Driver("/usr/share/vulkan/icd.d/lvp_icd.json", "libvulkan_lvp.so", "1.4", None)


def usable(**changes: Any) -> Probe:
    device = {"index": 0, "name": "Some GPU", "kind": "discrete", "driver": "radv Mesa 25.0.7", **changes}
    return Probe(
        "usable", device["name"], "libvulkan.so.1", "1.3.0", [RADEON], [], [device], 0, "the only device"
    )


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from oazoo.cli import main; main()", "doctor", *arguments]
    return subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True)


def test_the_command_says_which_device_and_that_it_is_software() -> None:
    device = run_probe().device
    assert device is not None
    done = run()
    assert done.returncode == 0, done.stderr
    assert f"models run on {device['name']}" in done.stdout
    assert ("this is a software device" in done.stdout) == (device["kind"] == "cpu")
    assert "numpy" in done.stdout and "PROBLEM" not in done.stdout
    assert "\x1b" not in done.stdout and done.stderr == ""


def test_json_holds_what_the_text_says() -> None:
    done = run("--json")
    report = json.loads(done.stdout)
    assert report["usable"] is True
    assert report["vulkan"]["devices"][report["vulkan"]["chosen"]]["name"] == report["vulkan"]["detail"]
    assert {p["name"] for p in report["packages"]} >= {"numpy", "vulkan", "click"}
    assert all(finding["level"] in ("ok", "note", "problem") for finding in report["findings"])


def test_without_a_device_it_exits_1_and_names_the_variable() -> None:
    done = run(VK_DRIVER_FILES="/nonexistent")
    assert done.returncode == 1
    assert "VK_DRIVER_FILES limits the search to /nonexistent" in done.stdout
    assert "unset VK_DRIVER_FILES" in done.stdout
    quiet = run("--quiet", VK_DRIVER_FILES="/nonexistent")
    assert quiet.returncode == 1
    assert quiet.stdout == f"no-driver: {PROBLEMS['no-driver']}\n"


@pytest.mark.parametrize(
    ("probe", "words", "remedy"),
    [
        (
            Probe("no-loader", PROBLEMS["no-loader"]),
            "loader library",
            "sudo apt-get install mesa-vulkan-drivers libvulkan1",
        ),
        (
            Probe("no-driver", PROBLEMS["no-driver"]),
            "no driver is installed",
            "sudo apt-get install mesa-vulkan-drivers libvulkan1",
        ),
        (
            Probe("no-device", PROBLEMS["no-device"], drivers=[RADEON]),
            "none of them finds a device",
            "sudo apt-get install mesa-vulkan-drivers libvulkan1",
        ),
        (
            Probe(
                "no-device", PROBLEMS["no-device"], drivers=[replace(LAVAPIPE, problem="libLLVM.so: missing")]
            ),
            "none of them finds a device",
            "sudo apt-get install --reinstall mesa-vulkan-drivers libvulkan1",
        ),
        (
            Probe(
                "no-permission",
                PROBLEMS["no-permission"],
                drivers=[RADEON],
                nodes=[RenderNode("/dev/dri/renderD128", False, "render")],
            ),
            "may not open it",
            "sudo usermod -aG render $USER   (then log in again)",
        ),
        (Probe("no-match", PROBLEMS["no-match"]), "OAZOO_DEVICE", "unset OAZOO_DEVICE"),
        (
            Probe("unsuitable", "no Vulkan device here can be used (Old GPU: Vulkan 1.0 is older than 1.2)"),
            "older than 1.2",
            "sudo apt-get install mesa-vulkan-drivers libvulkan1",
        ),
        (
            Probe("driver-failed", "the Vulkan driver failed (died of signal 11)"),
            "signal 11",
            "sudo apt-get install mesa-vulkan-drivers libvulkan1",
        ),
    ],
    ids=lambda value: value.code if isinstance(value, Probe) else "",
)
def test_every_problem_has_words_and_a_remedy(probe: Probe, words: str, remedy: str) -> None:
    findings = explain(probe, {}, DEBIAN_13)
    assert findings[0].level == "problem"
    assert words in findings[0].text
    assert findings[0].remedy == remedy
    assert findings[-1] == Finding("note", "convert, inspect and verify work without a Vulkan device")
    report = examine(probe)
    assert not report.usable


def test_every_code_is_explained() -> None:
    for code, words in PROBLEMS.items():
        assert explain(Probe(code, words), {}, DEBIAN_13)[0].level == "problem"


def test_a_gpu_is_named_without_further_words() -> None:
    assert explain(usable(), {}, DEBIAN_13) == [Finding("ok", "models run on Some GPU (the only device)")]


def test_a_software_device_beside_a_closed_gpu_is_told() -> None:
    probe = replace(
        usable(name="llvmpipe", kind="cpu", driver="llvmpipe Mesa 25.0.7"),
        nodes=[RenderNode("/dev/dri/renderD128", False, "render")],
    )
    texts = [finding.text for finding in explain(probe, {}, DEBIAN_13)]
    assert any("software device" in text for text in texts)
    assert any("/dev/dri/renderD128" in text and "may not open" in text for text in texts)


@pytest.mark.parametrize(("mesa", "told"), [("22.3.6", True), ("25.0.7", False), ("23.2.1-1ubuntu3", True)])
def test_an_old_software_driver_is_told(mesa: str, told: bool) -> None:
    probe = usable(name="llvmpipe", kind="cpu", driver=f"llvmpipe Mesa {mesa} (LLVM 15.0.6)")
    assert any("Mesa 25 is" in finding.text for finding in explain(probe, {}, DEBIAN_13)) == told


@pytest.mark.parametrize(
    ("outcome", "level", "words", "remedy"),
    [
        (Stress(2 << 30, [0, 256 << 20], [], []), "ok", "2,147,483,648 bytes holds what is written", None),
        (
            Stress(4 << 30, [0, 2 << 30, 3 << 30], [3 << 30, 2 << 30], [3 << 30]),
            "problem",
            "from byte 2,147,483,648 on",
            "export OAZOO_MAX_BUFFER_BYTES=1073741824",
        ),
        (Stress(0, [], [], [], "died of signal 11"), "problem", "died of signal 11", None),
    ],
    ids=["passed", "lost", "crashed"],
)
def test_the_stress_test_is_judged(outcome: Stress, level: str, words: str, remedy: str | None) -> None:
    finding = judge_stress(outcome)
    assert (finding.level, finding.remedy) == (level, remedy)
    assert words in finding.text


def test_a_device_that_fails_the_stress_test_is_not_usable() -> None:
    done = run("--stress", "--json", OAZOO_MEMORY_LIMIT="1000000")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert report["vulkan"]["code"] == "usable" and report["usable"] is False
    assert "OAZOO_MEMORY_LIMIT" in report["stress"]["problem"]


@pytest.mark.parametrize(
    ("release", "command"),
    [
        ({"ID": "ubuntu", "ID_LIKE": "debian"}, "sudo apt-get install mesa-vulkan-drivers libvulkan1"),
        (
            {"ID": "linuxmint", "ID_LIKE": "ubuntu debian"},
            "sudo apt-get install mesa-vulkan-drivers libvulkan1",
        ),
        ({"ID": "fedora"}, "sudo dnf install mesa-vulkan-drivers vulkan-loader"),
        (
            {"ID": "rocky", "ID_LIKE": "rhel centos fedora"},
            "sudo dnf install mesa-vulkan-drivers vulkan-loader",
        ),
        ({"ID": "manjaro", "ID_LIKE": "arch"}, "sudo pacman -S vulkan-swrast vulkan-icd-loader"),
        ({"ID": "opensuse-leap", "ID_LIKE": "suse opensuse"}, "sudo zypper install libvulkan_lvp libvulkan1"),
    ],
    ids=lambda value: value["ID"] if isinstance(value, dict) else "",
)
def test_the_command_fits_the_system(release: dict[str, str], command: str) -> None:
    assert install_command(release) == command


def test_bookworm_takes_its_backports_when_apt_has_them(tmp_path: Path) -> None:
    bookworm = {"ID": "debian", "VERSION_CODENAME": "bookworm"}
    assert install_command(bookworm, tmp_path) == "sudo apt-get install mesa-vulkan-drivers libvulkan1"
    (tmp_path / "mirror_debian_dists_bookworm-backports_main_binary-amd64_Packages.lz4").touch()
    command = "sudo apt-get install -t bookworm-backports mesa-vulkan-drivers libvulkan1"
    assert install_command(bookworm, tmp_path) == command
    assert install_command(DEBIAN_13, tmp_path) == "sudo apt-get install mesa-vulkan-drivers libvulkan1"


def test_os_release_is_read_with_and_without_quotes(tmp_path: Path) -> None:
    path = tmp_path / "os-release"
    path.write_text(
        "# a comment\nID=debian\nPRETTY_NAME=\"Debian GNU/Linux 12\"\nVERSION_CODENAME='bookworm'\n"
    )
    fields = read_os_release((str(tmp_path / "missing"), str(path)))
    assert fields == {"ID": "debian", "PRETTY_NAME": "Debian GNU/Linux 12", "VERSION_CODENAME": "bookworm"}
    assert read_os_release((str(tmp_path / "missing"),)) == {}


def test_packages_are_judged_by_their_lower_bounds() -> None:
    installed = {
        "numpy": "2.1.3",
        "click": "8.0",
        "vulkan": "1.3.275.1",
        "rich": "13.9.0rc1",
        "onnx": "1.17.0",
    }
    wanted = ["numpy>=2.0", "click >= 8.1", "vulkan>=1.3.275.1", "gone>=1", "rich>=13.9", "onnx"]
    judged = judge([*wanted, 'pytest>=8; extra == "dev"'], installed.get)
    assert {package.name: package.problem for package in judged} == {
        "numpy": None,
        "click": "8.0 is older than 8.1",
        "vulkan": None,
        "gone": "is not installed",
        "rich": None,
        "onnx": None,
    }


def test_this_environment_has_all_packages() -> None:
    assert [package for package in check_packages() if package.problem] == []
