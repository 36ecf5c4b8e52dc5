import sys
import warnings


def is_command_line() -> bool:
    """Whether this is `python -m flash_dmattn`, which imports the package before its __main__ runs."""
    package, options = __name__.rpartition(".")[0], sys.orig_argv[1:]
    return sys.argv[:1] == ["-m"] and "-m" in options and package in options


if (
    is_command_line()
):  # torch prints this warning when it is imported without numpy, which no command needs
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
