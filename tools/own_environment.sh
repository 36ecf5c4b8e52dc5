# A test script sources this file to run its tests in an environment of its own. The script sets `name` and `folder` before.

# skip REASON: ends the script with the reason.
skip() { echo "SKIPPED $name: $1"; exit 0; }

# create_environment: creates the environment in $folder, in front of the packages of the Python that is first on the PATH.
create_environment() {
  rm -rf "$folder"
  python -m venv --without-pip "$folder"
  python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$(echo "$folder"/lib/python*/site-packages)/base.pth"
}

# install OPTION... PACKAGE...: installs packages there. It skips the tests if pip finds no such package, which pip also reports without
# a network. After any other failure, such as a wrong hash, it ends the script with status 1.
install() {
  python -m pip --disable-pip-version-check --quiet --python "$folder/bin/python" install --no-compile "$@" 2>&1 |
    tee "$folder/pip.log" && return
  if grep -q '^ERROR: No matching distribution found' "$folder/pip.log"; then
    skip "pip finds no such package for this platform, or no network"
  fi
  exit 1
}

# run_tests ARGUMENT...: runs pytest there.
run_tests() {
  export PATH=$PWD/$folder/bin:$PATH OMP_NUM_THREADS=1
  python -m pytest "$@"
}
