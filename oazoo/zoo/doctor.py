"""What ``oazoo doctor`` knows: the state of Python, packages and Vulkan, what is missing and the command that
mends it.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from oazoo import __version__
from oazoo.runtime.probe import Probe, manifest_paths, run_probe
from oazoo.runtime.stress import Stress, run_stress

#: Features that people ask about. No kernel needs them; those for processors read 64 bits at a time where they can.
OPTIONAL_FEATURES = (
    "shaderInt64",
    "shaderFloat16",
    "storageBuffer16BitAccess",
    "shaderInt8",
    "storageBuffer8BitAccess",
)

#: Where apt keeps what it knows of its suites.
_APT_LISTS = Path("/var/lib/apt/lists")


@dataclass(frozen=True)
class Package:
    """A distribution that oazoo depends on. ``problem`` is None when it serves."""

    name: str
    wanted: str
    installed: str | None
    problem: str | None


@dataclass(frozen=True)
class Finding:
    """A sentence about this machine. ``level`` is ok, note or problem; ``remedy`` is a command, or None."""

    level: str
    text: str
    remedy: str | None = None


@dataclass(frozen=True)
class Report:
    """Everything that was found. ``usable`` tells whether models can run here."""

    oazoo: str
    python: str
    executable: str
    system: str
    packages: list[Package]
    vulkan: Probe
    stress: Stress | None
    findings: list[Finding]
    usable: bool


def examine(probe: Probe | None = None, *, stress: bool = False) -> Report:
    """Look at this machine. The Vulkan part runs in a process of its own, so a driver that crashes is only a
    finding.
    """
    found = run_probe() if probe is None else probe
    packages = check_packages()
    findings = [
        Finding("problem", f"{p.name}: {p.problem}", f"{sys.executable} -m pip install '{p.name}{p.wanted}'")
        for p in packages
        if p.problem is not None
    ]
    findings += explain(found, os.environ, read_os_release())
    outcome = run_stress() if stress and found.usable else None
    if outcome is not None:
        findings.append(judge_stress(outcome))
    return Report(
        oazoo=__version__,
        python=platform.python_version(),
        executable=sys.executable,
        system=system_name(),
        packages=packages,
        vulkan=found,
        stress=outcome,
        findings=findings,
        usable=found.usable and (outcome is None or outcome.passed),
    )


# --------------------------------------------------------------------------------------------------- packages


def check_packages(distribution: str = "oazoo") -> list[Package]:
    """Each run-time dependency of a distribution, judged; empty where the distribution is not installed."""
    try:
        requirements = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return list(judge(requirements, _installed_version))


def _installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def judge(requirements: Iterable[str], version_of: Callable[[str], str | None]) -> Iterator[Package]:
    """Requirements of the form ``name>=bound`` against the installed versions; those of extras are left out."""
    for requirement in requirements:
        match = re.match(r"([A-Za-z0-9._-]+)\s*(?:>=\s*([0-9.]+))?", requirement)
        if match is None or "extra ==" in requirement:
            continue
        name, bound = match[1], match[2]
        installed = version_of(name)
        problem = None
        if installed is None:
            problem = "is not installed"
        elif bound and _release(installed) < _release(bound):
            problem = f"{installed} is older than {bound}"
        yield Package(name, f">={bound}" if bound else "", installed, problem)


def _release(version: str) -> tuple[int, ...]:
    """The numbers before any suffix, without zeros at the end: 2.0 equals 2.0.0."""
    numbers = [int(part) for part in re.match(r"[0-9.]*", version)[0].split(".") if part]  # type: ignore[index]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


# ------------------------------------------------------------------------------------------------- the system


def read_os_release(paths: tuple[str, ...] = ("/etc/os-release", "/usr/lib/os-release")) -> dict[str, str]:
    """The fields of os-release(5); empty where there is none."""
    for path in paths:
        try:
            lines = Path(path).read_text("utf-8", errors="replace").splitlines()
        except OSError:
            continue
        pairs = (line.partition("=") for line in lines if "=" in line and not line.startswith("#"))
        return {name.strip(): value.strip().strip("\"'") for name, _, value in pairs}
    return {}


def system_name() -> str:
    """Such as ``Debian GNU/Linux 12 (bookworm), Linux 6.1.0, x86_64``."""
    name = read_os_release().get("PRETTY_NAME", "")
    parts = [name, f"{platform.system()} {platform.release()}", platform.machine()]
    return ", ".join(part for part in parts if part)


def install_command(os_release: Mapping[str, str], apt_lists: Path = _APT_LISTS) -> str:
    """The command that installs the Vulkan loader and Mesa's drivers, the software one among them, on this system."""
    names = {os_release.get("ID", ""), *os_release.get("ID_LIKE", "").split()}
    if names & {"fedora", "rhel"}:
        return "sudo dnf install mesa-vulkan-drivers vulkan-loader"
    if "arch" in names:
        return "sudo pacman -S vulkan-swrast vulkan-icd-loader"
    if names & {"suse", "opensuse"}:
        return "sudo zypper install libvulkan_lvp libvulkan1"
    if names & {"debian", "ubuntu"} or shutil.which("apt-get"):
        bookworm = os_release.get("ID") == "debian" and os_release.get("VERSION_CODENAME") == "bookworm"
        suite = "-t bookworm-backports " if bookworm and _knows_backports(apt_lists) else ""
        return f"sudo apt-get install {suite}mesa-vulkan-drivers libvulkan1"
    return "install the Vulkan loader and Mesa's Vulkan drivers with the system's package manager"


def _knows_backports(apt_lists: Path) -> bool:
    return any(apt_lists.glob("*_bookworm-backports_main_binary-*_Packages*"))


def in_container() -> bool:
    """Whether this looks like a container, where a GPU has to be handed in from outside."""
    return Path("/.dockerenv").exists() or Path("/run/.containerenv").exists() or "container" in os.environ


# ------------------------------------------------------------------------------------------------ the verdict


def explain(probe: Probe, environ: Mapping[str, str], os_release: Mapping[str, str]) -> list[Finding]:
    """What the probe's result means for a person, most important first."""
    install = install_command(os_release)
    if probe.usable:
        return [*_about_the_device(probe), *_about_hidden_hardware(probe, install)]
    variable = next((name for name in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES") if environ.get(name)), None)
    findings = []
    if probe.code in ("no-driver", "no-device") and variable is not None:
        what = (
            "which holds no driver manifest"
            if not manifest_paths(environ)
            else "whose drivers find no device"
        )
        text = f"{probe.detail}. {variable} limits the search to {environ[variable]}, {what}"
        findings.append(Finding("problem", text, f"unset {variable}"))
    elif probe.code in ("no-loader", "no-driver"):
        findings.append(Finding("problem", probe.detail, install))
    elif probe.code == "no-device":
        software = any("lvp" in Path(driver.manifest).name for driver in probe.drivers)
        broken = any(driver.problem for driver in probe.drivers)
        if broken and "apt-get" in install:
            install = install.replace("install ", "install --reinstall ", 1)
        if not software or broken:
            findings.append(Finding("problem", probe.detail, install))
        else:
            findings.append(Finding("problem", f"{probe.detail}, not even Mesa's software driver answers"))
        if in_container():
            text = "in a container a GPU must be handed in (Docker: --device /dev/dri, or --gpus all)"
            findings.append(Finding("note", text))
    elif probe.code == "no-permission":
        findings.append(Finding("problem", probe.detail, _join_group(probe)))
    elif probe.code == "no-match":
        findings.append(Finding("problem", probe.detail, "unset OAZOO_DEVICE"))
    elif probe.code == "unsuitable":
        text = f"{probe.detail}. Mesa's software driver has all that is needed"
        findings.append(Finding("problem", text, install))
    else:
        findings.append(Finding("problem", probe.detail, install))
    findings.append(Finding("note", "convert, inspect and verify work without a Vulkan device"))
    return findings


def _about_the_device(probe: Probe) -> Iterator[Finding]:
    device = probe.device
    if device is None:
        return
    yield Finding("ok", f"models run on {device['name']} ({probe.reason})")
    if device["kind"] != "cpu":
        return
    text = "this is a software device: it computes on the processor, many times slower than a GPU would"
    yield Finding("note", text)
    mesa = re.search(r"Mesa (\d+)", device["driver"])
    if mesa is not None and int(mesa[1]) < 24:
        text = f"{device['driver']} works; Mesa 25 is 2 to 4 times faster (in bookworm-backports)"
        command = "sudo apt-get install -t bookworm-backports mesa-vulkan-drivers libvulkan1"
        yield Finding("note", text, command if _knows_backports(_APT_LISTS) else None)


def _about_hidden_hardware(probe: Probe, install: str) -> Iterator[Finding]:
    """A GPU that is there and not used, while the software device is."""
    device = probe.device
    if device is None or device["kind"] != "cpu":
        return
    if any(not node.accessible for node in probe.nodes):
        paths = ", ".join(node.path for node in probe.nodes if not node.accessible)
        text = f"a GPU is there ({paths}), but this user may not open it"
        yield Finding("note", text, _join_group(probe))
    nvidia = Path("/proc/driver/nvidia").exists() or Path("/dev/nvidia0").exists()
    if nvidia and not any("nvidia" in Path(driver.manifest).name for driver in probe.drivers):
        text = "an NVIDIA GPU is there without its Vulkan driver (in a container: NVIDIA_DRIVER_CAPABILITIES=all)"
        yield Finding("note", text)


def judge_stress(outcome: Stress) -> Finding:
    """What the outcome of the stress test means for a person."""
    if outcome.passed:
        text = f"a buffer of {outcome.nbytes:,} bytes holds what is written to it ({len(outcome.offsets)} places)"
        return Finding("ok", text)
    if outcome.problem is not None:
        return Finding("problem", f"the stress test could not be run: {outcome.problem}")
    wrong = sorted({*outcome.wrong_in_kernel, *outcome.wrong_in_transfer})
    text = f"a buffer of {outcome.nbytes:,} bytes loses what is written to it, from byte {wrong[0]:,} on"
    # Half of what held: the fault begins somewhere before the first wrong mark.
    limit = max(outcome.good_bytes // 2, 1 << 20)
    return Finding(
        "problem", f"{text}; a newer driver may help, a limit does", f"export OAZOO_MAX_BUFFER_BYTES={limit}"
    )


def _join_group(probe: Probe) -> str:
    groups = {node.group for node in probe.nodes if not node.accessible and node.group} or {"render"}
    return f"sudo usermod -aG {','.join(sorted(groups))} $USER   (then log in again)"
