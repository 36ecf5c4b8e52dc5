"""Text with a pass key: bytes of Python's standard library with a number in one line, which the last line asks for."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset

from doge_demo.corpus import Corpus

DIGITS = 4
_STATED, _ASKED = b"\n# KEY=", b"\n# KEY="


class PassKeyTexts(Dataset):
    """Texts int64 [length] that differ by their number, which is also their seed.

    `answer_weight` texts of the loss: labels are -100 nowhere; the digits of the answer are the last DIGITS bytes.
    """

    def __init__(self, text: Tensor, length: int, count: int, seed: int = 0):
        self.text, self.length, self.count, self.seed = text, length, count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        random = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        ids = pass_key_text(self.text, self.length, random)
        return {"input_ids": ids, "labels": ids}


def pass_key_text(text: Tensor, length: int, random: torch.Generator) -> Tensor:
    """uint8 [bytes] -> int64 [length]: text, a line with a number somewhere in it, and the number again at its end."""
    key = bytes(torch.randint(48, 58, (DIGITS,), generator=random).tolist())
    stated, asked = _STATED + key, _ASKED + key
    room = length - len(stated) - len(asked)
    begin = int(torch.randint(len(text) - room, (), generator=random))
    place = int(torch.randint(room // 8, room * 3 // 4, (), generator=random))
    words = bytes(text[begin : begin + room].tolist())
    whole = words[:place] + stated + words[place:] + asked
    return torch.tensor(list(whole))


def held_out_texts(corpus: Corpus, length: int, count: int) -> Tensor:
    """[count, length], always the same ones."""
    texts = PassKeyTexts(corpus.held_out, length, count, seed=7)
    return torch.stack([texts[index]["input_ids"] for index in range(count)])
