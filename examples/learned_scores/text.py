"""Text with a pass key: bytes of Python's standard library with a number in one line, which later lines ask for."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from doge_demo.corpus import Corpus

DIGITS = 4
_BEFORE = b"\n# KEY="
# The least number of bytes per question. The more questions there are, the sooner a base learns to answer.
_BYTES_OF_A_QUESTION = 32


class PassKeyTexts(Dataset):
    """Texts int64 [length], each drawn with its own seed. A text asks for its number one to `length` / 32 times, the last time at its
    end."""

    def __init__(self, text: Tensor, length: int, count: int, seed: int = 0):
        self.text, self.length, self.count, self.seed = text, length, count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids, _ = self.with_answers(index)
        return {"input_ids": ids, "labels": ids}

    def with_answers(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns a text, and which of its bytes are digits of an answer, bool [length]."""
        random = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        most = max(1, self.length // _BYTES_OF_A_QUESTION)
        questions = int(torch.randint(1, most + 1, (), generator=random))
        return pass_key_text(self.text, self.length, questions, random)


def pass_key_text(
    text: Tensor, length: int, questions: int, random: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Makes a text with a number from uint8 [bytes]. Returns int64 [length] and bool [length].

    A line in the first half has the number, and lines after it repeat it. The bools are True for the digits of repetitions.
    """
    line = _BEFORE + bytes(torch.randint(48, 58, (DIGITS,), generator=random).tolist())
    return _with_lines(text, torch.tensor(list(line)), DIGITS, length, questions, random)


def _with_lines(
    text: Tensor, line: Tensor, digits: int, length: int, questions: int, random: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Does what pass_key_text does, for any tokens: a line of them, whose last `digits` are the number."""
    room = length - (1 + questions) * len(line)
    begin = int(torch.randint(len(text) - room, (), generator=random))
    words = text[begin : begin + room].long()
    stated = int(torch.randint(room // 8, room // 2, (), generator=random))
    between = torch.randint(stated, room, (questions - 1,), generator=random).sort().values.tolist()
    places = [stated, *between, room]
    is_digit = torch.arange(len(line)) >= len(line) - digits
    ids, answers, last = [], [], 0
    for number, place in enumerate(places):
        ids += [words[last:place], line]
        answers += [torch.zeros(place - last, dtype=torch.bool), is_digit & (number > 0)]
        last = place
    return torch.cat(ids), torch.cat(answers)


def held_out_texts(corpus: Corpus, length: int, count: int) -> Tensor:
    """Returns the same `count` texts at every call, [count, length], with one question each."""
    random = torch.Generator().manual_seed(7)
    rows = [pass_key_text(corpus.held_out, length, 1, random)[0] for _ in range(count)]
    return torch.stack(rows)


def held_out_tokens(
    ids: Tensor, tokenizer: PreTrainedTokenizerBase, length: int, count: int
) -> tuple[Tensor, int]:
    """Does what held_out_texts does, for the tokens of a text, and how many tokens at their ends are the number."""
    random = torch.Generator().manual_seed(7)
    before = _tokens(tokenizer, _BEFORE.decode())
    rows, digits = [], None
    while len(rows) < count:
        number = str(int(torch.randint(10 ** (DIGITS - 1), 10**DIGITS, (), generator=random)))
        line = _tokens(tokenizer, _BEFORE.decode() + number)
        shared = (line[: len(before)] == before[: len(line)]).long().cumprod(0).sum()
        digits = digits or len(line) - int(shared)
        if len(line) - shared == digits:  # a few numbers have a different number of tokens
            rows.append(_with_lines(ids, line, digits, length, 1, random)[0])
    return torch.stack(rows), digits


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> Tensor:
    return torch.tensor(tokenizer(text, add_special_tokens=False).input_ids)
