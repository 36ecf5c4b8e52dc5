"""The command `python -m flash_dmattn serve`: the server of transformers, if it is installed."""

import argparse


def run(parser: argparse.ArgumentParser, options: list[str]) -> int:
    """Runs the server with the options of `transformers serve`, and returns the exit status."""
    try:
        from ..integrations.serving.transformers_server import serve
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
