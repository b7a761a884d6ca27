#!/bin/sh
# Sets this checkout up: .venv/ with oazoo and its development tools, and a Vulkan driver when no device answers.
#
#   tools/setup.sh            everything that is missing; quick, and without network, when nothing is
#   tools/setup.sh --driver   also installs the recommended driver where an older software driver already works
#
# Environment: PYTHON=/path/to/python3.x chooses the interpreter (3.11 or newer).
# Only root installs system packages; everybody else is told the command.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
cd "$root"

venv="$root/.venv"
stamp="$venv/.oazoo-setup"
minimum="3.11"
want_driver=no
for option in "$@"; do
    case $option in
        --driver) want_driver=yes ;;
        *) echo "setup: unknown option $option (known: --driver)" >&2; exit 2 ;;
    esac
done

say() { printf 'setup: %s\n' "$*"; }
fail() { for line in "$@"; do printf 'setup: %s\n' "$line" >&2; done; exit 1; }
is_root() { [ "$(id -u)" = 0 ]; }
has() { command -v "$1" >/dev/null 2>&1; }

# ---------------------------------------------------------------------------------------------------- system packages

apt_updated=no
apt_update() {
    if [ "$apt_updated" = no ]; then
        say "reading the package lists (apt-get update)"
        apt-get -qq update || say "apt-get update had trouble; going on with the lists that are there"
        apt_updated=yes
    fi
}

apt_install() {  # apt_install [-t SUITE] PACKAGE...
    DEBIAN_FRONTEND=noninteractive DEBCONF_NOWARNINGS=yes apt-get -qq -y --no-install-recommends install "$@" >/dev/null
}

os_field() {  # os_field ID → its value in os-release, without quotes
    for file in /etc/os-release /usr/lib/os-release; do
        if [ -r "$file" ]; then
            sed -n "s/^$1=//p" "$file" | sed 's/^"\(.*\)"$/\1/' | head -n 1
            return
        fi
    done
}

# ------------------------------------------------------------------------------------------------------------- Python

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }
new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
makes_venvs() { "$1" -c 'import venv, ensurepip' 2>/dev/null; }

python=""
find_python() {  # sets $python to the first interpreter that is new enough, preferring one that can make a venv
    python=""
    if [ -n "${PYTHON:-}" ]; then
        has "$PYTHON" || fail "PYTHON=$PYTHON is no program."
        new_enough "$PYTHON" || fail "PYTHON=$PYTHON is Python $(version_of "$PYTHON"); oazoo needs $minimum or newer."
        python=$PYTHON
        return
    fi
    for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
        if has "$candidate" && new_enough "$candidate"; then
            if makes_venvs "$candidate"; then python=$candidate; return; fi
            [ -n "$python" ] || python=$candidate
        fi
    done
}

apt_knows() { apt-cache show "$1" >/dev/null 2>&1; }

provide_python() {  # makes $python an interpreter that can make a virtual environment, or stops with the way there
    find_python
    if [ -n "$python" ] && makes_venvs "$python"; then return; fi
    if [ -n "$python" ]; then
        packages="python$(version_of "$python")-venv"
    elif has python3; then
        packages=""  # the distribution's default is too old: look for a newer one beside it
    else
        packages="python3 python3-venv"
    fi
    if ! has apt-get; then
        fail "no Python >= $minimum with the venv module was found, and this is no Debian or Ubuntu system." \
             "Install Python $minimum or newer, then: make setup PYTHON=/path/to/python3"
    fi
    if ! is_root; then
        [ -n "$packages" ] || packages="python3.12 python3.12-venv"
        fail "Python >= $minimum with the venv module is needed. Install it, then run make again:" \
             "    sudo apt-get install $packages"
    fi
    apt_update
    if [ -n "$packages" ]; then
        say "installing $packages"
        # shellcheck disable=SC2086  # a list of package names
        apt_install $packages || fail "apt-get could not install: $packages"
        find_python
    fi
    if [ -z "$python" ]; then
        for minor in 14 13 12 11; do
            if apt_knows "python3.$minor-venv"; then
                say "installing python3.$minor"
                apt_install "python3.$minor" "python3.$minor-venv" && break
            fi
        done
        find_python
    fi
    if [ -z "$python" ]; then
        fail "the newest Python here is $(version_of python3 || echo missing), and this distribution has none >= $minimum." \
             "Install a newer Python by other means, then: make setup PYTHON=/path/to/python3.12"
    fi
    makes_venvs "$python" || fail "$python lacks the venv module; install python$(version_of "$python")-venv."
}

# ------------------------------------------------------------------------------------------- the virtual environment

fingerprint() {  # what the environment was made from; it is made anew when this changes
    {
        printf '%s\n' "$root"
        cat pyproject.toml
        "$venv/bin/python" -c 'import sys; print(sys.version)'
    } | cksum
}

environment_is_fresh() {
    [ -x "$venv/bin/python" ] && [ -x "$venv/bin/oazoo" ] && [ -r "$stamp" ] \
        && [ "$(sed -n 1p "$stamp")" = "$(fingerprint)" ]
}

make_environment() {
    # A virtual environment holds absolute paths: one that was made in another folder, or by an interpreter that is
    # gone or too old, is made anew.
    if [ -e "$venv" ]; then
        if ! new_enough "$venv/bin/python" || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1 \
            || { [ -r "$stamp" ] && [ "$(sed -n 2p "$stamp")" != "$root" ]; }; then
            provide_python
            say "making .venv anew with Python $(version_of "$python")"
            "$python" -m venv --clear "$venv"
        fi
    else
        provide_python
        say "making .venv with Python $(version_of "$python")"
        "$python" -m venv "$venv"
    fi
    rm -f "$stamp"
    say "installing oazoo, what it depends on and its development tools into .venv (a minute or two)"
    # pip reads dependency groups from 25.1 on.
    if ! "$venv/bin/python" -c 'import re, pip, sys
sys.exit(tuple(int(n) for n in re.findall(r"\d+", pip.__version__)[:2]) < (25, 1))'; then
        install_with_pip --upgrade 'pip>=25.1'
    fi
    install_with_pip --editable . --group dev
    { fingerprint; printf '%s\n' "$root"; } >"$stamp"
}

install_with_pip() {
    # setuptools warns about what an editable install is; that is no news to who asked for one.
    PYTHONWARNINGS=ignore "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@" || fail \
        "pip could not install the Python packages; its own words are above." \
        "The first set-up, and one after a change to pyproject.toml, needs the package index. When it can be reached," \
        "run make setup again: what is already installed is kept."
}

# ------------------------------------------------------------------------------------------------- the Vulkan driver

# The answer of the probe is one line: "usable<TAB>NAME<TAB>TYPE<TAB>DRIVER", or "CODE<TAB>what is wrong".
probe() {
    answer=$("$venv/bin/python" -m oazoo.runtime.probe --brief) \
        || [ -n "$answer" ] || fail "the Vulkan probe itself failed; see: .venv/bin/oazoo doctor"
    status=$(printf '%s\n' "$answer" | cut -f 1)
    detail=$(printf '%s\n' "$answer" | cut -f 2)
}

on_bookworm() { [ "$(os_field ID)" = debian ] && [ "$(os_field VERSION_CODENAME)" = bookworm ]; }

backports_file=/etc/apt/sources.list.d/oazoo-bookworm-backports.sources

add_backports() {  # succeeds when bookworm-backports can be installed from
    if apt-cache policy 2>/dev/null | grep -q 'n=bookworm-backports'; then return 0; fi
    mkdir -p "${backports_file%/*}"
    if ! "$venv/bin/python" tools/debian_backports.py bookworm >"$backports_file.new"; then
        rm -f "$backports_file.new"
        return 1
    fi
    mv "$backports_file.new" "$backports_file"
    say "adding the bookworm-backports suite ($backports_file)"
    if apt-get -qq update -o Dir::Etc::sourcelist="$backports_file" -o Dir::Etc::sourceparts=- \
        -o APT::Get::List-Cleanup=0 && apt-cache policy | grep -q 'n=bookworm-backports'; then return 0; fi
    rm -f "$backports_file"
    return 1
}

install_driver() {
    apt_update
    if on_bookworm; then
        if add_backports; then
            say "installing Mesa's Vulkan drivers from bookworm-backports"
            if apt_install -t bookworm-backports mesa-vulkan-drivers libvulkan1; then return; fi
        fi
        say "bookworm-backports could not be used: taking the distribution's Mesa 22.3 (correct, but slower)"
    else
        say "installing Mesa's Vulkan drivers"
    fi
    apt_install mesa-vulkan-drivers libvulkan1 \
        || fail "apt-get could not install mesa-vulkan-drivers and libvulkan1; run apt-get update and try again."
}

driver_command() {  # what a person with root types
    if on_bookworm && apt-cache policy 2>/dev/null | grep -q 'n=bookworm-backports'; then
        echo "sudo apt-get install -t bookworm-backports mesa-vulkan-drivers libvulkan1"
    elif has apt-get; then
        echo "sudo apt-get install mesa-vulkan-drivers libvulkan1"
    elif has dnf; then
        echo "sudo dnf install mesa-vulkan-drivers vulkan-loader"
    elif has pacman; then
        echo "sudo pacman -S vulkan-swrast vulkan-icd-loader"
    else
        echo "(your system's packages of the Vulkan loader and of Mesa's Vulkan drivers)"
    fi
}

provide_device() {
    probe
    if [ "$status" = usable ]; then
        driver=$(printf '%s\n' "$answer" | cut -f 4)
        case "$driver" in
            *"Mesa 22."*) old_software=yes ;;
            *) old_software=no ;;
        esac
        case "$detail" in llvmpipe*) ;; *) old_software=no ;; esac
        if [ "$want_driver" = yes ] && is_root && has apt-get; then
            install_driver
            probe
        elif [ "$old_software" = yes ] && on_bookworm; then
            say "the software driver here is $driver; Mesa 25 from bookworm-backports is 2 to 4 times faster:"
            say "    as root, tools/setup.sh --driver installs it"
        fi
        [ "$status" = usable ] || fail "$detail"
        say "Vulkan device: $detail"
        return
    fi
    say "no usable Vulkan device: $detail"
    # A driver only helps where none is, or where none of those that are there finds hardware.
    case "$status" in
        no-loader | no-driver | no-device | driver-failed) ;;
        *) fail "see .venv/bin/oazoo doctor for what to do about it" ;;
    esac
    if is_root && has apt-get; then
        install_driver
        probe
        [ "$status" = usable ] || fail "the driver is installed, but still: $detail" "see .venv/bin/oazoo doctor"
        say "Vulkan device: $detail"
    else
        fail "Everything else is set up: converting and inspecting models works, running them does not." \
             "To run them, install a driver for your GPU, or this software driver, and run make again:" \
             "    $(driver_command)"
    fi
}

if environment_is_fresh; then
    say ".venv is up to date"
else
    make_environment
fi
provide_device
