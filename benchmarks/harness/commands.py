"""Splits the command of a record into the programs that made it, and refuses text that is not a command."""

from __future__ import annotations

import itertools
import re
import shlex

_PROGRAM = re.compile(
    r"(make [\w-]+|python -m [\w.]+|(?:python |torchrun (?:--nproc_per_node \d+ )?)?[\w./-]+\.py|bench_\w+)(?: |$)"
)
_SETTING = re.compile(r"[A-Z][A-Z0-9_]*=.*")  # of the environment, before a program
_LEADING = 3  # most words before the first option: a subcommand and two paths
# The end of a word as in a sentence, or an operator of a shell.
_PROSE = re.compile(r"\w[,.:;]|[();<>|&]+")


def split_commands(text: str) -> list[tuple[str, list[str]]]:
    """Returns (program, arguments) of each command; several are joined by `&&`.

    A program is a Python file or module, alone or after `python` or `torchrun`, a target of make, or a benchmark of the C++ library.
    Settings of the environment may precede it, as in `OMP_NUM_THREADS=1 bench.py run`.

    Raises ValueError for anything else, such as a sentence or an operator of a shell.
    """
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    commands: list[list[str]] = [[]]
    for word in lexer:
        if word == "&&":
            commands.append([])
        else:
            commands[-1].append(word)
    return [_split_command(words) for words in commands]


def _split_command(words: list[str]) -> tuple[str, list[str]]:
    words = list(itertools.dropwhile(_SETTING.fullmatch, words))
    program = _PROGRAM.match(" ".join(words))
    arguments = words[len(program[1].split()) :] if program else []
    leading = list(itertools.takewhile(lambda word: not word.startswith("-"), arguments))
    is_prose = any(_PROSE.fullmatch(word[-2:]) for word in arguments)
    if program is None or is_prose or len(leading) > _LEADING:
        raise ValueError(f"got {shlex.join(words)!r}, expected a program and its arguments")
    return program[1], arguments
