#!/usr/bin/env bash
# test_newest.sh PACKAGE...: runs the tests marked `transformers` on the newest releases of these packages that pip finds now.
#
# It installs the releases into build/newest, in front of the other packages of the Python that is first on the PATH. It does not test
# releases that this Python has already. It prints the versions and the verdict in a box, and also names a newer torch that it did not test.
#
# It fails if a test fails on a release of transformers from 4.57 to the one that this Python has. Failures on later releases, which
# others publish at any time, and releases that pip does not find are only printed.
set -uo pipefail

[ $# -gt 0 ] || { echo "test_newest.sh: got nothing, expected packages" >&2; exit 2; }

cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=build/newest log=build/newest.log

# in_box LINE...: prints the lines in a box.
in_box() {
  local width=0 line bar
  for line in "$@"; do width=$((${#line} > width ? ${#line} : width)); done
  bar=$(printf '%*s' $((width + 2)) '' | tr ' ' '=')
  printf '\n+%s+\n' "$bar"
  for line in "$@"; do printf '| %-*s |\n' "$width" "$line"; done
  printf '+%s+\n' "$bar"
}

# install OPTION... PACKAGE...: installs packages with pip.
install() { python -m pip --disable-pip-version-check --quiet install "$@"; }

# versions PACKAGE...: prints the versions that Python imports.
versions() {
  python -c 'import importlib.metadata as m, sys; print(*(f"{p} {m.version(p)}" for p in sys.argv[1:]), sep=", ")' "$@"
}

# newest_of PACKAGE...: prints the newest releases that pip finds, in the form of `versions`, and downloads none.
newest_of() {
  local report
  report=$(install --dry-run --ignore-installed --no-deps --report - "$@") && python -c '
import json, sys
found = (item["metadata"] for item in json.load(sys.stdin)["install"])
print(*sorted("{name} {version}".format(**one) for one in found), sep=", ")' <<<"$report"
}

# untested_torch PACKAGE...: prints a line about the newest torch, unless torch is one of the packages or this Python has that version.
untested_torch() {
  [[ " $* " == *" torch "* ]] && return
  local found present
  found=$(newest_of torch 2>/dev/null) present=$(versions torch)
  if [ -z "$found" ]; then
    echo "newest torch: NOT TESTED, pip finds none; here $present"
  elif [ "$found" != "${present%%+*}" ]; then
    echo "newest $found, here $present: NOT TESTED. The command that tests it: make test-newest NEWEST=\"$* torch\""
  fi
}

# is_supported VERSION: whether a version of transformers is 4.57 to that of this Python, corrections of the last one included.
is_supported() {
  python -c '
import re, sys
first, last, version = (tuple(map(int, re.findall(r"\d+", v)[:2])) for v in sys.argv[1:])
sys.exit(not first <= version <= last)' 4.57 "$ours" "$1"
}

version_of() { python -c 'import importlib.metadata as m; print(m.version("transformers"))'; }

ours=$(version_of)
newest=$(newest_of "$@")
mapfile -t untested < <(untested_torch "$@")
if [ -z "$newest" ]; then
  in_box "newest releases of $*: NOT TESTED, pip finds none" "${untested[@]}"
  exit 0
elif [ "$newest" = "$(versions $(printf '%s\n' "$@" | sort))" ]; then
  in_box "newest releases: $newest" "the same as in this environment, which make test tests" "${untested[@]}"
  exit 0
fi
rm -rf "$folder" "$log"
if ! install --no-compile --target "$folder" "$@"; then
  in_box "newest releases: $newest" "NOT TESTED, pip cannot install them" "${untested[@]}"
  exit 0
fi
export PYTHONPATH=$PWD/$folder OMP_NUM_THREADS=1
{
  python -m flash_dmattn info &&
    python -m pytest --numprocesses "${JOBS:-2}" --dist worksteal -m transformers tests/python/integrations
} 2>&1 | tee "$log"
status=${PIPESTATUS[0]}
verdict=PASSED
if [ "$status" != 0 ]; then
  verdict=FAILED
  is_supported "$(version_of)" || verdict="FAILED on a release that is not supported yet" status=0
fi
in_box "newest releases: $newest; with $(versions transformers torch)" "$verdict: $(tail -1 "$log" | tr -d =)" "${untested[@]}"
exit "$status"
