#!/usr/bin/env bash
# provide_cpp_library.sh NAME FOLDER COMPILER...: makes sure that there is GoogleTest (NAME googletest) or Google Benchmark (benchmark) to build
# with. Where the system has none for what the compiler compiles for, Debian's packages are unpacked into FOLDER, which needs no root.
set -euo pipefail

[ $# -ge 3 ] || { echo "provide_cpp_library.sh: got $# arguments, expected a name, a folder and a compiler" >&2; exit 2; }
name=$1 folder=$2
shift 2
case $name in
  googletest) header=gtest/gtest.h links="-lgtest -lgtest_main" package=libgtest-dev ;;
  benchmark) header=benchmark/benchmark.h links=-lbenchmark package=libbenchmark-dev ;;
  *) echo "provide_cpp_library.sh: got $name, expected googletest or benchmark" >&2; exit 2 ;;
esac
mkdir -p "$folder"
cd "$folder"

# shellcheck disable=SC2086
if echo "#include <$header>" | "$@" -std=c++20 -x c++ - -shared -fPIC $links -pthread -o probe 2>/dev/null; then
  rm probe
  exit
fi
if ! command -v apt-get >/dev/null || ! command -v dpkg >/dev/null; then
  echo "No $name found: install its development package (Debian, Ubuntu: $package; elsewhere gtest-devel, google-benchmark)." >&2
  exit 1
fi

echo "No $name found: unpacking Debian's package into $folder"
rm -f ./*.deb
architecture=$(dpkg --print-architecture)
case $("$@" -dumpmachine) in
  aarch64-*) architecture=arm64 ;;
esac
# download [OPTION...]: downloads the package, and the library of its version if that is a separate package.
download() {
  apt-get -q=2 "$@" download "$package:$architecture" || return 1
  local library
  library=$(apt-cache "$@" depends "$package:$architecture" | awk '$1 == "Depends:" && $2 ~ /^lib(gtest|benchmark)/ { print $2; exit }')
  [ -z "$library" ] || apt-get -q=2 "$@" download "${library%%:*}:$architecture"
}
if ! download 2>/dev/null; then
  # This machine's package lists are empty, out of date or of another architecture, and only root may change that: use a copy.
  mkdir -p apt/lists/partial apt/archives/partial
  own=(-o "Dir::State::lists=$PWD/apt/lists" -o "Dir::Cache=$PWD/apt" -o "APT::Architecture=$architecture")
  if ! { apt-get -q=2 "${own[@]}" update && download "${own[@]}"; }; then
    echo "$name could not be downloaded: install it (Debian, Ubuntu: apt install $package)." >&2
    exit 1
  fi
  rm -rf apt
fi
for archive in ./*.deb; do dpkg -x "$archive" .; done
rm -f ./*.deb
