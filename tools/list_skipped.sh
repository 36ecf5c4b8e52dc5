#!/usr/bin/env bash
# list_skipped.sh BUILD_FOLDER: prints which tests the last run of ctest skipped, with the reasons, and what tests did not compare.
set -euo pipefail

[ $# = 1 ] || { echo "list_skipped.sh: got $# arguments, expected a build folder" >&2; exit 2; }

awk '/^(SKIPPED|NOT COMPARED)/ { print }        # a whole executable: tests/cpp/main.cpp
     reason      { print "SKIPPED " $0; reason = 0 }
     /: Skipped$/ { reason = 1 }                # one test: GoogleTest prints the reason on the next line
' "$1/Testing/Temporary/LastTest.log" | sort -u
