#!/usr/bin/env bash
# build_wheels.sh KIND...: builds wheels into dist/, each with the lowest platform tag that auditwheel grants it.
#
#   cpu      x86_64
#   aarch64  cross-compiled (Debian: g++-aarch64-linux-gnu); its C++ tests run under qemu (qemu-user)
#   cuda     x86_64 with the CUDA kernels, for example version 2.0.0+cu130; takes twenty minutes of a core.
#            CUDA_ARCHITECTURES="90-real" builds a part of them
#
# The Python that is first on the PATH has torch and the groups `tools` and `wheels` of pyproject.toml, and `cuda` for CUDA: see
# `make wheels`.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
cxx_aarch64=aarch64-linux-gnu-g++

# wheel KIND [OPTION...]: builds the wheel in build/wheels/KIND.
wheel() {
  local kind=$1
  shift
  rm -rf "build/wheels/$kind/"*.whl
  python -m pip wheel . --quiet --no-build-isolation --no-deps --wheel-dir "build/wheels/$kind" \
    -C "build-dir=build/wheels/$kind/build" -C cmake.define.FLASH_DMATTN_WERROR=ON "$@"
}

# repair KIND: writes the wheel of build/wheels/KIND into dist/ with its platform tag. It leaves torch's libraries to the installed torch.
repair() {
  python -m auditwheel repair --wheel-dir dist --exclude 'libtorch*.so' --exclude 'libc10*.so' "build/wheels/$1/"*.whl
}

# torch_for ARCHITECTURE: downloads the torch to compile against, of the version that Python has here, and prints its folder.
torch_for() {
  local folder=build/wheels/torch-$1 version
  version=$(python -c 'from importlib.metadata import version; print(version("torch").partition("+")[0])')
  if [ ! -e "$folder/$version" ]; then
    rm -rf "$folder"
    python -m pip download --quiet --no-deps --only-binary=:all: --dest "$folder" --python-version 3.11 \
      --platform "manylinux_2_28_$1" "torch==$version"
    python -m zipfile -e "$folder"/torch-*.whl "$folder/all"
    mkdir "$folder/lib"
    mv "$folder/all/torch/include" "$folder"
    mv "$folder/all/torch/lib/libtorch_cpu.so" "$folder/lib"
    rm -r "$folder/all" "$folder"/*.whl
    touch "$folder/$version"
  fi
  echo "$root/$folder"
}

cpu() {
  wheel cpu -C cmake.define.FLASH_DMATTN_CUDA=OFF
  repair cpu
}

aarch64() {
  local toolchain=cmake/aarch64-linux-gnu.cmake gtest=build/wheels/googletest-aarch64
  tools/provide_cpp_library.sh googletest "$gtest" "$cxx_aarch64"
  cmake --preset cpu -B build/wheels/aarch64/tests --toolchain "$toolchain" -D FLASH_DMATTN_TESTS=ON \
    -D FLASH_DMATTN_WERROR=ON -D "GTest_ROOT=$root/$gtest/usr"
  cmake --build build/wheels/aarch64/tests
  FLASH_DMATTN_QUICK_TESTS=1 ctest --test-dir build/wheels/aarch64/tests --output-on-failure  # without slow cases
  _PYTHON_HOST_PLATFORM=linux-aarch64 wheel aarch64 -C cmake.define.FLASH_DMATTN_CUDA=OFF \
    -C "cmake.define.CMAKE_TOOLCHAIN_FILE=$root/$toolchain" \
    -C "cmake.define.FLASH_DMATTN_TORCH_DIR=$(torch_for aarch64)"
  repair aarch64
}

cuda() {
  local toolkit programs
  programs=$(echo "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"/nvidia/cu*/bin)
  toolkit=$(nvcc --version | sed -nE 's/.*release ([0-9]+)\.([0-9]+).*/cu\1\2/p')
  wheel cuda -C cmake.define.FLASH_DMATTN_CUDA=ON -C "cmake.define.CMAKE_PROGRAM_PATH=$programs" \
    ${CUDA_ARCHITECTURES:+-C "cmake.define.FLASH_DMATTN_CUDA_ARCHITECTURES=$CUDA_ARCHITECTURES"}
  add_local_version cuda "$toolkit"
  repair cuda
}

# add_local_version KIND LOCAL: changes the wheel's version 2.0.0 to 2.0.0+LOCAL, so that the wheels of CPU and CUDA differ in their names.
add_local_version() {
  local folder=build/wheels/$1 unpacked
  python -m wheel unpack --dest "$folder/unpacked" "$folder/"*.whl
  unpacked=$(echo "$folder/unpacked/"*)
  sed -i "s/^Version: .*/&+$2/" "$unpacked/"*.dist-info/METADATA
  mv "$unpacked/"*.dist-info "$unpacked/$(basename "$unpacked")+$2.dist-info"
  rm "$folder/"*.whl
  python -m wheel pack --dest-dir "$folder" "$unpacked"
  rm -r "$folder/unpacked"
}

[ $# -gt 0 ] || { sed -nE '2,/^set/s/^# ?//p' "${BASH_SOURCE[0]}"; exit 2; }
for kind in "$@"; do
  case $kind in
    cpu | aarch64 | cuda) ;;
    *) echo "build_wheels.sh: got $kind, expected cpu, aarch64 or cuda" >&2; exit 2 ;;
  esac
done
for kind in "$@"; do "$kind"; done
ls -l dist
