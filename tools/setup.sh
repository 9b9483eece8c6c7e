#!/bin/sh
# Make .venv and install onejob into it: `tools/setup.sh all` to use it, `tools/setup.sh dev` to work on it.
#
# Does nothing if that was done for this pyproject.toml, these constraints, clients and folder. A .venv that is half made, was
# moved here from elsewhere, or whose Python has gone, is made again. What is missing on the machine is named with the
# command that installs it; for `dev`, as root on Debian or Ubuntu, it is installed.
set -eu
cd "$(dirname "$0")/.."
extra=${1:-all}
stamp=.venv/onejob-setup

say() { printf '%s\n' "$*" >&2; }
fail() { say "error: $1"; say "cure: $2"; exit 1; }
has() { command -v "$1" >/dev/null 2>&1; }
may_apt() { [ "$(id -u)" = 0 ] && has apt-get; }

apt_install() {
    say "apt-get install $*"
    export DEBIAN_FRONTEND=noninteractive
    # lists may be missing or old, so a first failure is no failure yet
    apt-get install -y -q --no-install-recommends "$@" >/dev/null 2>&1 && return
    apt-get update -q >/dev/null || say "apt-get update failed; going on with the lists that are there"
    apt-get install -y -q --no-install-recommends "$@" >/dev/null
}

# A program and the package that brings it: installed where we may, named where not.
need() {
    program=$1 package=$2
    has "$program" && return
    if [ "$extra" = dev ] && may_apt; then apt_install "$package"; fi
    has "$program" || fail "'$program' is not installed" "apt-get install $package   (as root)"
}

find_python() {
    for name in ${PYTHON:-} python3 python3.13 python3.12 python3.11; do
        has "$name" && "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$name"; return; }
    done
    return 1
}

has_venv() { "$1" -c 'import venv, ensurepip' >/dev/null 2>&1; }

check_python() {
    if ! python=$(find_python) && [ "$extra" = dev ] && may_apt; then
        apt_install python3 python3-venv && python=$(find_python) || true
    fi
    [ -n "${python:-}" ] || fail "Python 3.11 or newer is not installed" \
        "apt-get install python3 python3-venv   (as root; Debian 12, Ubuntu 24.04 or newer); or name one: make PYTHON=/path/to/python3"
    has_venv "$python" && return
    if [ "$extra" = dev ] && may_apt; then apt_install python3-venv || true; fi
    has_venv "$python" || fail "$python has no venv module" "apt-get install python3-venv   (as root)"
}

# The tests start a PostgreSQL of their own; they only need its programs.
check_postgres() {
    has initdb && return
    for folder in /usr/lib/postgresql/*/bin; do [ -x "$folder/initdb" ] && return; done
    if may_apt; then apt_install postgresql; return; fi
    fail "PostgreSQL is not installed (the tests run on it as well as on SQLite)" "apt-get install postgresql   (as root)"
}

# What the stamp must say: `dev` brings all that `all` does.
wanted() { cat pyproject.toml constraints.txt tools/clients.py | cksum; pwd; }
is_done() {
    [ -x .venv/bin/onejob ] && [ -f "$stamp-$1" ] && [ "$(cat "$stamp-$1")" = "$(wanted)" ] \
        && .venv/bin/python -c 'import onejob' 2>/dev/null
}

is_sound() {
    [ -f .venv/here ] && [ "$(cat .venv/here)" = "$(pwd)" ] && .venv/bin/python -m pip --version >/dev/null 2>&1 \
        && .venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))'
}

make_venv() {
    is_sound && return
    if [ -e .venv ]; then say ".venv is half made or from elsewhere: making it again"; rm -rf .venv; fi
    say "making a virtual environment in .venv with $("$python" --version)"
    "$python" -m venv .venv || { rm -rf .venv; fail "$python could not make .venv" "apt-get install python3-venv   (as root)"; }
    pwd >.venv/here
}

# The tests run a real Triton; there is one for some versions of Python only.
install_triton() {
    .venv/bin/python -m onejob.engines.triton.wheel >/dev/null && return
    version=$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    if may_apt && apt_install "libpython$version" && .venv/bin/python -m onejob.engines.triton.wheel >/dev/null; then return; fi
    say "going on without a Triton: its tests are skipped here, and fail where nothing may be left out (CI)"
}

# Clients that can't live beside onejob. What can't be had is told by the script.
install_clients() {
    .venv/bin/python tools/clients.py .venv/clients || say "going on without; where nothing may be left out (CI), the tests fail"
}

install() {
    say "installing onejob[$extra] with the versions of constraints.txt (a few minutes the first time) ..."
    began=$(date +%s)
    rm -f "$stamp"-*
    .venv/bin/python -m pip install -qq --disable-pip-version-check --no-input --root-user-action=ignore \
        -c constraints.txt -e ".[$extra]" \
        || fail "pip could not install onejob" "read pip's message above; running the same command again goes on from there"
    if [ "$extra" = dev ]; then install_triton; install_clients; fi
    say "installed in $(($(date +%s) - began)) s"
    wanted >"$stamp-$extra"
}

case $extra in all | dev) ;; *) fail "unknown extra '$extra'" "tools/setup.sh all, or tools/setup.sh dev" ;; esac
if [ "$extra" = dev ]; then check_postgres; fi
if is_done "$extra" || { [ "$extra" = all ] && is_done dev; }; then exit 0; fi
need git git
need make make
if [ "$extra" = dev ]; then need curl curl; fi
check_python
make_venv
install
