"""Text with a pass key: bytes of Python's standard library with a number in one line, which later lines ask for."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset

from doge_demo.corpus import Corpus

DIGITS = 4
_BEFORE = b"\n# KEY="
_LINE = len(_BEFORE) + DIGITS
_BYTES_OF_A_QUESTION = 32  # at least; the more there are, the sooner a base learns to answer


class PassKeyTexts(Dataset):
    """Texts int64 [length], each of a seed of its own. They ask for their number once to `length` / 32 times, at
    last at their end."""

    def __init__(self, text: Tensor, length: int, count: int, seed: int = 0):
        self.text, self.length, self.count, self.seed = text, length, count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids, _ = self.with_answers(index)
        return {"input_ids": ids, "labels": ids}

    def with_answers(self, index: int) -> tuple[Tensor, Tensor]:
        """A text and which of its bytes are digits of an answer, bool [length]."""
        random = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        most = max(1, self.length // _BYTES_OF_A_QUESTION)
        questions = int(torch.randint(1, most + 1, (), generator=random))
        return pass_key_text(self.text, self.length, questions, random)


def pass_key_text(
    text: Tensor, length: int, questions: int, random: torch.Generator
) -> tuple[Tensor, Tensor]:
    """uint8 [bytes] -> text, a line with a number in its first half, and lines that repeat the number: int64 [length], and
    where the digits of the repetitions are, bool [length]."""
    line = _BEFORE + bytes(torch.randint(48, 58, (DIGITS,), generator=random).tolist())
    room = length - (1 + questions) * _LINE
    begin = int(torch.randint(len(text) - room, (), generator=random))
    words = bytes(text[begin : begin + room].tolist())
    stated = int(torch.randint(room // 8, room // 2, (), generator=random))
    between = torch.randint(stated, room, (questions - 1,), generator=random).sort().values.tolist()
    places = [stated, *between, room]
    parts, answers, last = [], [], 0
    for number, place in enumerate(places):
        parts += [words[last:place], line]
        answers += [False] * (place - last + len(_BEFORE)) + [number > 0] * DIGITS
        last = place
    ids = torch.frombuffer(bytearray().join(parts), dtype=torch.uint8)
    return ids.long(), torch.tensor(answers)


def held_out_texts(corpus: Corpus, length: int, count: int) -> Tensor:
    """[count, length], always the same ones, with one question."""
    random = torch.Generator().manual_seed(7)
    rows = [pass_key_text(corpus.held_out, length, 1, random)[0] for _ in range(count)]
    return torch.stack(rows)
