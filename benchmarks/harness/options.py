"""Values of options, as argparse takes them: a wrong one is an error that names what it got and what was expected."""

from __future__ import annotations

import argparse

from . import record


def positive(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected 1 or more")
    return int(text)


def commit(text: str) -> str:
    if not record.is_commit(text):
        raise argparse.ArgumentTypeError(
            f"got {text}, expected a commit's hash of 7 digits or more"
        )
    return text


class Different(argparse.Action):
    """Several values without repetitions, as no configuration is measured twice."""

    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, list(dict.fromkeys(values)))
