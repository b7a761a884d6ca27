"""Look at Python, the Vulkan driver and devices, and say what is missing and how to mend it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from oazoo.cli.common import emit, emit_json, emit_table, format_bytes, is_quiet, json_option, quiet_option
from oazoo.zoo.doctor import OPTIONAL_FEATURES, Report, examine

_MARKS = {"ok": "ok", "note": "note", "problem": "PROBLEM"}


@click.command()
@click.option(
    "--stress", is_flag=True, help="Also write to and read from all over the largest buffer in use."
)
@json_option
@quiet_option
def command(stress: bool, as_json: bool) -> int:
    """Look at this machine: can models run here, on which device, and if not, what to do.

    Exits 0 when a Vulkan device is usable (and, with --stress, passes), 1 otherwise. OAZOO_DEVICE chooses
    among devices: an index, a UUID, "cpu" or part of a name. With --quiet, one line tells the verdict.
    """
    report = examine(stress=stress)
    if as_json:
        emit_json(asdict(report))
    elif is_quiet():
        emit(f"{report.vulkan.code}: {report.vulkan.detail}")
        for finding in report.findings:
            if finding.level == "problem" and report.vulkan.usable:
                emit(f"{finding.text}.")
    else:
        _print(report)
    return 0 if report.usable else 1


def _print(report: Report) -> None:
    emit(f"oazoo {report.oazoo} on Python {report.python} ({report.executable})")
    emit(report.system)
    emit("")
    emit("Packages: " + ", ".join(f"{p.name} {p.installed or 'missing'}" for p in report.packages))
    emit("")
    probe = report.vulkan
    emit(f"Vulkan loader: {f'{probe.loader_version}, {probe.loader}' if probe.loader else 'none'}")
    if probe.drivers:
        rows = [(d.manifest, d.api_version, d.problem or "loads") for d in probe.drivers]
        emit_table(("Driver", "Vulkan", "Library"), rows)
    else:
        emit("Vulkan drivers: none")
    for node in probe.nodes:
        emit(f"{node.path}: {'accessible' if node.accessible else f'no permission (group {node.group})'}")
    for device in probe.devices:
        _print_device(device, chosen=device["index"] == probe.chosen)
    for finding in report.findings:
        emit(f"{_MARKS[finding.level]}: {finding.text}.")
        if finding.remedy is not None:
            emit(f"    {finding.remedy}")


def _print_device(device: dict[str, Any], *, chosen: bool) -> None:
    kind = "software device on the processor" if device["kind"] == "cpu" else f"{device['kind']} device"
    emit(f"Device {device['index']}: {device['name']}, {kind}{', chosen' if chosen else ''}")
    present = set(device["features"])
    optional = ", ".join(f"{name} {'yes' if name in present else 'no'}" for name in OPTIONAL_FEATURES)
    heaps = ", ".join(
        f"{format_bytes(size)}{' (device)' if local else ' (host)'}" for size, local in device["heaps"]
    )
    rows = [
        ("driver", device["driver"]),
        ("Vulkan", ".".join(str(part) for part in device["api_version"])),
        ("UUID", device["uuid"]),
        ("memory", heaps),
        ("largest allocation", format_bytes(device["max_allocation_bytes"])),
        ("largest buffer", format_bytes(device["max_buffer_bytes"])),
        ("subgroup size", device["subgroup_size"]),
        (
            "workgroup",
            f"{device['max_invocations']} lanes, {device['max_shared_bytes'] // 1024} KiB shared memory",
        ),
        ("optional", optional),
        ("usable", "yes" if device["problem"] is None else f"no: {device['problem']}"),
    ]
    for name, value in rows:
        emit(f"    {name}: {value}")
    emit("")
