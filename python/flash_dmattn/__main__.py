"""python -m flash_dmattn {info,check,serve}"""

import os
import signal
import sys

import flash_dmattn

from ._core import finite
from ._core.availability import backends
from .check import cli
from .check import info as info_options
from .check import options as check_options


def main(arguments: list[str] | None = None) -> int:
    parser = cli.Parser(prog="python -m flash_dmattn", description=flash_dmattn.__doc__)
    version = f"flash_dmattn {flash_dmattn.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    info = commands.add_parser("info", help="version, backends and why others cannot run, kernels")
    info_options.add_to(info)
    check = commands.add_parser(
        "check",
        help="compare this installation with double precision",
        epilog=check_options.EXIT_STATUS,
    )
    check_options.add_to(check)
    commands.add_parser(
        "serve",
        help="transformers' server for a model with this attention; takes the options of `transformers serve`",
        add_help=False,
    )
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["serve"]:  # its options are not ours
        return _serve(parser, words[1:])
    parsed = parser.parse_args(words)
    if parsed.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        backends()
        finite.read_setting()
        cli.check_settings()
    except (ValueError, RuntimeError) as error:  # a setting in the environment that has no meaning
        parser.error(str(error).splitlines()[0])
    if parsed.command == "info":
        return info_options.info(parsed)
    from .check.run import check as run_check

    try:
        return run_check(parsed)
    except BrokenPipeError:
        raise
    except OSError as error:  # a full disk, a folder that was removed
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1


def _serve(parser: cli.Parser, options: list[str]) -> int:
    try:
        from .integrations.serving.transformers_server import serve
    except ImportError as error:
        parser.error(
            f"serve: {error}; expected transformers 5.24 with what its server needs: "
            'pip install "transformers[serving]==5.24.*"'
        )
    try:
        serve(options, f"{parser.prog} serve")
    except (OSError, ValueError) as error:
        # A model that is neither a folder nor a name of the hub, an option that the model does not take.
        if isinstance(error, ValueError) and not str(error).startswith("--"):
            raise
        parser.error(f"serve: {' '.join(str(error).split())}")
    return 0


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")  # names of files may be of any bytes
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader (for example `head`) closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        status = 128 + signal.SIGPIPE
    sys.exit(status)
