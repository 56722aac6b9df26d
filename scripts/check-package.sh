#!/usr/bin/env bash
# What `cargo package` makes of the library: that it compiles without CUDA, that it is below 2 MB, and that every file is in
# it which the sources and their examples include, those for CUDA too.
#   scripts/check-package.sh
# Build products go to $CARGO_TARGET_DIR as always.
set -euo pipefail
cd "$(dirname "$0")/.."
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$PWD/target}"

cargo package --package candle-fused --locked --allow-dirty --quiet
version="$(cargo metadata --format-version 1 --no-deps --locked | python3 -c '
import json, sys
print(next(p["version"] for p in json.load(sys.stdin)["packages"] if p["name"] == "candle-fused"))')"

python3 - "$CARGO_TARGET_DIR/package/candle-fused-$version.crate" <<'PYTHON'
import os, re, sys, tarfile

LIMIT = 2_000_000
path = sys.argv[1]
size = os.path.getsize(path)
# `include!`, `include_str!` and `include_bytes!` with a path that is relative to the file, or to the package's root.
INCLUDE = re.compile(
    r'include(?:_str|_bytes)?!\(\s*(?:concat!\(\s*env!\("CARGO_MANIFEST_DIR"\),\s*)?"([^"]+)"'
)
MODULE = re.compile(r'#\[path = "([^"]+)"\]')
with tarfile.open(path) as archive:
    names = {member.name.split("/", 1)[1]: member for member in archive.getmembers()}
    missing, count = [], 0
    for name, member in sorted(names.items()):
        if not (name.startswith("src/") or name == "build.rs") or not name.endswith(".rs"):
            continue
        text = archive.extractfile(member).read().decode()
        # Every include is one of the known forms, or one of what the build script writes.
        known = len(INCLUDE.findall(text)) + len(re.findall(r'include[a-z_]*!\(\s*concat!\(\s*env!\("OUT_DIR"\)', text))
        if known != len(re.findall(r"\binclude(?:_str|_bytes)?!\(", text)):
            sys.exit(f"check-package: {name} includes a file in a form that is not known here")
        for target in INCLUDE.findall(text) + MODULE.findall(text):
            root = "" if target.startswith("/") else os.path.dirname(name)
            target = os.path.normpath(os.path.join(root, target.lstrip("/")))
            count += 1
            if target not in names:
                missing.append(f"{target}, which {name} includes")
if missing:
    sys.exit("check-package: the package lacks " + "; ".join(missing))
if not count:
    sys.exit("check-package: no includes found, expected some")
if size >= LIMIT:
    sys.exit(f"check-package: the package has {size:,} bytes, expected below {LIMIT:,}")
print(f"check-package: {size:,} bytes, {len(names)} files, {count} includes found in it")
PYTHON
