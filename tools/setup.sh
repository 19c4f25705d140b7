#!/bin/sh
# Installs the Debian packages that a purpose needs and that are missing: setup.sh build|check|demo.
# Nothing missing: nothing is touched (works without network and without root). Missing and not root:
# prints the exact command to run and stops.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
want=$(awk -v p="$1" '$1 == "build" || $1 == p { print $2 }' "$here/packages.txt" | sort -u)
missing=
for p in $want; do
    dpkg-query -W -f='${Status}' "$p" 2>/dev/null | grep -q 'ok installed' || missing="$missing $p"
done
[ -n "$missing" ] || { echo "setup: every Debian package is here"; exit 0; }
echo "setup: missing packages:$missing"
if [ "$(id -u)" != 0 ]; then
    echo "setup: not root, so nothing was installed. Run this, then try again:"
    echo "    sudo apt-get update && sudo apt-get install -y --no-install-recommends$missing"
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
echo "setup: apt-get update"
apt-get update -qq >"$log" 2>&1 || { tail -n 5 "$log"; echo "setup: apt-get update failed (no network?)"; exit 1; }
echo "setup: apt-get install$missing"
# shellcheck disable=SC2086
apt-get install -y -qq --no-install-recommends $missing >"$log" 2>&1 || { tail -n 15 "$log"; exit 1; }
rm -f "$log"
