#!/usr/bin/env bash
# Debian's chromium, for the tests of the studio. Does nothing where it is installed, or where apt is not there.
set -u
[ -x /usr/bin/chromium ] && exit 0
if ! command -v apt-get > /dev/null || [ "$(id -u)" != 0 ]; then
    echo "tests/studio need /usr/bin/chromium: install the package chromium" >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
{ apt-get install -y -q --no-install-recommends chromium || { apt-get update -q && apt-get install -y -q --no-install-recommends chromium; }; } > /dev/null 2>&1 ||
    echo "chromium could not be installed: the tests of the studio in a browser are skipped" >&2
