#!/usr/bin/env bash
# googletest.sh FOLDER COMPILER...: makes sure that there is a GoogleTest to build the tests with. Where the system has none
# for what the compiler compiles for, Debian's package is unpacked into FOLDER, which needs no root.
set -euo pipefail

folder=$1
shift
mkdir -p "$folder"
cd "$folder"

if echo '#include <gtest/gtest.h>' | "$@" -std=c++20 -x c++ - -lgtest -lgtest_main -pthread -o probe 2>/dev/null; then
  rm probe
  exit
fi
if ! command -v apt-get >/dev/null || ! command -v dpkg >/dev/null; then
  echo "No GoogleTest found: install its development package (Fedora: gtest-devel, Arch: gtest, Homebrew: googletest)." >&2
  exit 1
fi

echo "No GoogleTest found: unpacking Debian's package into $folder"
rm -f ./*.deb
architecture=$(dpkg --print-architecture)
case $("$@" -dumpmachine) in
  aarch64-*) architecture=arm64 ;;
esac
package=libgtest-dev:$architecture
if ! apt-get -q=2 download "$package" 2>/dev/null; then
  # This machine's package lists are empty, out of date or of another architecture, and only root may change that: use a copy.
  mkdir -p apt/lists/partial apt/archives/partial
  own=(-o "Dir::State::lists=$PWD/apt/lists" -o "Dir::Cache=$PWD/apt" -o "APT::Architecture=$architecture")
  if ! { apt-get -q=2 "${own[@]}" update && apt-get -q=2 "${own[@]}" download "$package"; }; then
    echo "GoogleTest could not be downloaded: install it (Debian, Ubuntu: apt install libgtest-dev)." >&2
    exit 1
  fi
  rm -rf apt
fi
dpkg -x libgtest-dev_*.deb .
rm -f ./*.deb
