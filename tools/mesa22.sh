#!/bin/sh
# Unpacks Debian 12's own Mesa 22.3 software driver into build/mesa22, beside whatever is installed:
#   VK_DRIVER_FILES=build/mesa22/lvp_icd.json chooses it. Needs a Debian 12 machine; nothing is installed.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
folder="$root/build/mesa22"
manifest="$folder/lvp_icd.json"
fail() { for line in "$@"; do printf 'mesa22: %s\n' "$line" >&2; done; exit 1; }

if [ -r "$manifest" ]; then exit 0; fi
command -v apt-get >/dev/null 2>&1 || fail "this needs apt-get and Debian 12."
newest_of_22() {
    apt-cache madison mesa-vulkan-drivers 2>/dev/null \
        | awk -F '|' '{ gsub(/ /, "", $2) } $2 ~ /^22\./ { print $2; exit }'
}
version=$(newest_of_22)
if [ -z "$version" ] && [ "$(id -u)" = 0 ]; then
    apt-get -qq update || true
    version=$(newest_of_22)
fi
[ -n "$version" ] || fail "apt knows no mesa-vulkan-drivers 22.x here; Debian 12 (bookworm) has it."

rm -rf "$folder"
mkdir -p "$folder/download"
# apt's download user may not be allowed into this folder; the package is public, so root may fetch it itself.
(cd "$folder/download" && apt-get -qq -o APT::Sandbox::User=root download "mesa-vulkan-drivers=$version") \
    || fail "apt-get could not download mesa-vulkan-drivers $version."
dpkg-deb --extract "$folder"/download/mesa-vulkan-drivers_*.deb "$folder/root"
library=$(find "$folder/root" -name libvulkan_lvp.so | head -n 1)
[ -n "$library" ] || fail "mesa-vulkan-drivers $version holds no software driver."
cp "$library" "$folder/libvulkan_lvp.so"
rm -rf "$folder/root" "$folder/download"
# A library path with a slash is relative to the manifest, so the folder may be moved.
printf '{"file_format_version": "1.0.0", "ICD": {"library_path": "./libvulkan_lvp.so", "api_version": "1.3.230"}}\n' \
    >"$manifest.new"
mv "$manifest.new" "$manifest"
printf 'mesa22: Mesa %s is in build/mesa22\n' "$version"
