#!/usr/bin/env bash
# list_skipped.sh BUILD_FOLDER: the tests that the last run of ctest skipped, and the reasons; and what tests did not compare.
set -euo pipefail

awk '/^(SKIPPED|NOT COMPARED)/ { print }        # a whole executable: tests/cpp/main.cpp
     reason      { print "SKIPPED " $0; reason = 0 }
     /: Skipped$/ { reason = 1 }                # one test: GoogleTest prints the reason on the next line
' "$1/Testing/Temporary/LastTest.log" | sort -u
