"""Print the apt source of a Debian release's backports suite, on the mirror that this machine already uses.

    python tools/debian_backports.py bookworm [--apt-folder /etc/apt] > …/backports.sources

Reads both of apt's forms, one-line (``*.list``) and deb822 (``*.sources``), finds the entry that serves the
release's ``main``, and prints a deb822 entry with the same address, options and key for the suite
``RELEASE-backports``. Exits 1 when no entry serves the release. The text of the fields is handed on as it is:
apt judges it.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

#: deb822 names of the one-line form's options, for those that matter when the same mirror is used again.
_OPTIONS = {
    "arch": "Architectures",
    "signed-by": "Signed-By",
    "trusted": "Trusted",
    "check-valid-until": "Check-Valid-Until",
    "check-date": "Check-Date",
}
_KEPT = tuple(_OPTIONS.values())


def entries(apt_folder: Path) -> Iterator[dict[str, str]]:
    """Every enabled binary entry of the apt configuration, as deb822 fields."""
    parts = apt_folder / "sources.list.d"
    for path in [
        apt_folder / "sources.list",
        *sorted(parts.glob("*.list")),
        *sorted(parts.glob("*.sources")),
    ]:
        try:
            text = path.read_text("utf-8", errors="replace")
        except OSError:
            continue
        yield from (_deb822(text) if path.suffix == ".sources" else _one_line(text))


def _one_line(text: str) -> Iterator[dict[str, str]]:
    for line in text.splitlines():
        match = re.match(r"\s*deb\s+(?:\[([^\]]*)\]\s+)?(cdrom:\[[^\]]*\]\S*|\S+)\s+(\S+)\s+([^#]*)", line)
        if match is None:
            continue
        options, uri, suite, components = match.groups()
        if uri.startswith("cdrom:"):
            continue
        fields = {"URIs": uri, "Suites": suite, "Components": components.strip()}
        for option in (options or "").split():
            name, _, value = option.partition("=")
            if name.lower() in _OPTIONS:
                fields[_OPTIONS[name.lower()]] = value.replace(",", " ")
        yield fields


def _deb822(text: str) -> Iterator[dict[str, str]]:
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    for paragraph in re.split(r"\n[ \t]*\n", "\n".join(lines)):
        fields: dict[str, str] = {}
        name = ""
        for line in paragraph.splitlines():
            if line[:1] in (" ", "\t"):  # a continuation, such as the lines of a key
                if name:
                    fields[name] += "\n" + line
            elif ":" in line:
                name, _, value = line.partition(":")
                name = {"uris": "URIs", "signed-by": "Signed-By"}.get(
                    name.strip().lower(), name.strip().title()
                )
                fields[name] = value.strip()
        if "deb" in fields.get("Types", "").split() and fields.get("Enabled", "yes").lower() != "no":
            yield fields


def backports_source(apt_folder: Path, release: str) -> str | None:
    """The deb822 text for ``RELEASE-backports``, or None when no entry of this machine serves the release."""
    for fields in entries(apt_folder):
        uris = [uri for uri in fields.get("URIs", "").split() if not uri.startswith("cdrom:")]
        if not uris or release not in fields.get("Suites", "").split():
            continue
        if "main" not in fields.get("Components", "").split():
            continue
        kept = [f"{name}: {fields[name]}" for name in _KEPT if name in fields]
        head = ["Types: deb", f"URIs: {uris[0]}", f"Suites: {release}-backports", "Components: main"]
        return "\n".join([*head, *kept]) + "\n"
    return None


def main() -> int:
    """Command line: print the entry, or say on stderr why there is none."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("release", help="code name of the Debian release, such as bookworm")
    parser.add_argument("--apt-folder", type=Path, default=Path("/etc/apt"))
    arguments = parser.parse_args()
    source = backports_source(arguments.apt_folder, arguments.release)
    if source is None:
        print(f"no apt source here serves {arguments.release} main", file=sys.stderr)
        return 1
    print(source, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
