#!/bin/sh
# Prints the path of a Chromium: $BROWSER_PATH, or one that is installed; where there is none and we may, Debian's package
# is installed. Otherwise one line on the standard error says what is missing, and the exit status is 1.
set -eu

find_browser() {
    for name in "${BROWSER_PATH:-}" chromium chromium-browser google-chrome google-chrome-stable chrome chrome-headless-shell; do
        if [ -n "$name" ] && command -v "$name"; then
            return 0
        fi
    done
    return 1
}

find_browser && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    log=$(mktemp)
    echo "no Chromium is installed: installing Debian's (log: $log)" >&2
    export DEBIAN_FRONTEND=noninteractive
    if { apt-get update && apt-get install --yes --no-install-recommends chromium fonts-dejavu-core; } >"$log" 2>&1; then
        find_browser && exit 0
    fi
    echo "error: apt-get could not install chromium: $(grep -m 1 -E '^(E|Err)' "$log" || tail -n 1 "$log")" >&2
else
    echo "error: no Chromium found: install chromium (Debian, Ubuntu: apt-get install chromium) or set BROWSER_PATH" >&2
fi
exit 1
