#!/bin/sh
# Makes a container image of a small Debian for tests, without any image registry: a tar archive of its root.
#
#     tests/make_image.sh OUT.tar [MIRROR]
#
# Needs root, debootstrap and a Debian mirror (debootstrap's own, unless one is given); takes one to two minutes and 450 MB
# below the directory of OUT.tar meanwhile.
set -eu
out=$(realpath "$1")
work=$(mktemp -d "$(dirname "$out")/.image-XXXXXX")
trap 'rm -rf "$work"' EXIT
debootstrap --variant=minbase --include=git,python3,procps,iproute2 bookworm "$work/root" ${2:+"$2"} >"$work/log" 2>&1 || {
    tail -n 3 "$work/log" >&2
    exit 1
}
cd "$work/root"
rm -rf usr/share/doc/* usr/share/man/* usr/share/info/* usr/share/locale/* var/cache/apt/* var/lib/apt/lists/* var/log/*
tar -cf "$work/image.tar" --exclude='./proc/*' --exclude='./sys/*' --exclude='./dev/*' .
mv "$work/image.tar" "$out"
