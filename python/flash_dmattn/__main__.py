"""python -m flash_dmattn {info,check}"""

import os
import signal
import sys

import flash_dmattn

from ._core import finite
from ._core.availability import backends
from .command_line import check, info
from .command_line.parser import Parser, check_settings


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m flash_dmattn", description=flash_dmattn.__doc__)
    version = f"flash_dmattn {flash_dmattn.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    info.add_options(
        commands.add_parser("info", help="version, backends and why others cannot run, kernels")
    )
    check.add_options(
        commands.add_parser(
            "check",
            help="compare this installation with double precision",
            epilog=check.EXIT_STATUS,
        )
    )
    parsed = parser.parse_args(arguments)
    if parsed.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        backends()
        finite.read_setting()
        check_settings()
    except (ValueError, RuntimeError) as error:  # a setting in the environment that has no meaning
        parser.error(str(error).splitlines()[0])
    return info.run(parsed) if parsed.command == "info" else check.run(parsed, parser.prog)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")  # names of files may be of any bytes
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader (for example `head`) closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        status = 128 + signal.SIGPIPE
    sys.exit(status)
