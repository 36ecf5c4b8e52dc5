#!/usr/bin/env bash
# list_skipped.sh BUILD_FOLDER: what the last run of ctest skipped, and why.
set -euo pipefail

awk '/^SKIPPED / { print }                      # a whole executable: tests/cpp/main.cpp
     reason      { print "SKIPPED " $0; reason = 0 }
     /: Skipped$/ { reason = 1 }                # one test: GoogleTest says why on the next line
' "$1/Testing/Temporary/LastTest.log" | sort -u
