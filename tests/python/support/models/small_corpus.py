"""A small corpus for the examples, because reading the whole standard library takes seconds."""

from pathlib import Path

import torch

from corpus import Corpus


def small_corpus():
    text = torch.frombuffer(bytearray(Path(torch.__file__).read_bytes()), dtype=torch.uint8)
    return Corpus(text, text, 1)
