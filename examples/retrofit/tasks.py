"""Texts with something to recall: tasks after the definitions of RULER (arXiv 2404.06654), and others to train with."""

import random
import re
from dataclasses import dataclass
from statistics import mode
from string import ascii_uppercase, digits

from transformers import PreTrainedTokenizerBase

NAMES = ("one needle", "four keys", "four values", "variables", "common words")
_WORDS = """harbor island jungle kitten lagoon meadow nectar orchid pepper quartz saddle timber basket candle desert engine forest
garden hammer insect jacket kettle ladder magnet nickel oyster parrot rabbit temple velvet walnut window anchor bottle carpet
dragon falcon ginger helmet marble pencil puzzle rocket spider tunnel turtle violin banner copper cradle dancer feather guitar
hunter lantern mirror narrow pillow ribbon shadow silver summer valley winter""".split()  # fmt: skip
_NUMBERS = range(10**4, 10**5)  # A small model often copies RULER's seven digits with an error.
# Facts of training texts, all about other words than those of the tasks, two in the sentence of the needles: (a fact, its
# beginning when it is repeated). Facts in the form of code would make every assignment worth keeping.
_ASKED = "special magic number for {0} mentioned in the provided text"
_TRAINING_FACTS = (
    ("The code of the {0} is {1}.", "The code of the {0} is"), ("The {0} was built in {1}.", "The {0} was built in"),
    ("Remember that the {0} weighs {1} grams.", "How much does the {0} weigh? It weighs"),
    ("Room {1} is reserved for the {0}.", "Which room is reserved for the {0}? Room"),
    ("Please note: the {0} costs {1} dollars.", "The price of the {0} is"), ("{0}: see page {1}", "{0}: see page"),
    ("To reach the {0}, please call {1}.", "The {0} is reached at"),
    ("My password for the {0} was {1}, but don't tell anybody.", "The password for the {0} was"),
    ("One of the special magic numbers for {0} is: {1}.", f"The {_ASKED} is"),
    ("One of the special magic numbers for {0} is: {1}.", f"What is the {_ASKED}? The {_ASKED} is"),
)  # fmt: skip


@dataclass
class Sample:
    """A text, questions that may follow it, and for each of them what the model has to write within `new_tokens`."""

    text: list[int]
    questions: list[list[int]]
    answers: list[list[str]]
    new_tokens: int


class Tasks:
    """Makes texts of `length` tokens, in which facts stand at random places between tokens of `filler`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, filler: list[int], length: int):
        self.tokenizer, self.filler, self.length = tokenizer, filler, length
        self.begin = tokenizer("").input_ids  # before every text
        counts = [len(self._tokens(" " + word)) for word in _WORDS]
        words = [word for word, n in zip(_WORDS, counts, strict=True) if n == mode(counts)]
        self.words, self.training_words = words[::2], words[1::2]

    def make_sample(self, name: str, number: int) -> Sample:
        """Returns a sample of one of NAMES, always the same for a number."""
        draw = random.Random(f"{name} {number}")
        if name in ("variables", "common words"):
            return (self._variables if name == "variables" else self._common_words)(draw)
        return self._needles(draw, *{"one needle": (1, 1), "four keys": (4, 1)}.get(name, (1, 4)))

    def cut_text(self, stream: list[int], draw: random.Random, more: int = 0) -> list[int]:
        """Returns what follows a random place of a stream, `length` tokens and `more`."""
        room = self.length + more - len(self.begin)
        if len(stream) < room:
            raise ValueError(f"texts: got {len(stream)} tokens of a kind, expected {room}")
        start = draw.randrange(len(stream) - room + 1)
        return self.begin + stream[start : start + room]

    def make_training_text(self, draw: random.Random) -> list[int]:
        """Returns tokens of filler with a fact about each word, as far as half of the text has room for them and their repeats.
        The repeats stand at the end, in another order."""
        told, asked, tokens = [], [], 0
        for word in draw.sample(self.training_words, len(self.training_words)):
            fact, beginning = draw.choice(_TRAINING_FACTS)
            value = "".join(draw.choices(draw.choice((digits, digits, ascii_uppercase)), k=draw.randint(3, 7)))  # fmt: skip
            fact = fact.format(word, value)
            again = f"{beginning.format(word)} {value}"
            tokens += len(self._tokens(fact + again)) + 6
            if told and tokens > self.length // 2:
                break
            told.append(f"\n\n{fact}\n\n")
            asked.append(f"\n\n{again}")
        draw.shuffle(asked)
        end = self._tokens("".join(asked))
        return self._hide(told, self.length - len(end), draw) + end

    def _needles(self, draw: random.Random, keys: int, values: int) -> Sample:
        words = draw.sample(self.words, keys)
        numbers = [[str(draw.choice(_NUMBERS)) for _ in range(values)] for _ in words]
        form = "\n\nOne of the special magic numbers for {} is: {}.\n\n"
        facts = [form.format(w, n) for w, ns in zip(words, numbers, strict=True) for n in ns]
        draw.shuffle(facts)
        what, be = ("number", "is") if values == 1 else ("numbers", "are")
        asked = f"the special magic {what} for {{0}} mentioned in the provided text"
        form = f"\n\nWhat {be} {asked}? {asked.capitalize()} {be}"
        return self._sample(facts, [form.format(w) for w in words], numbers, 4 + 8 * values, draw)

    def _variables(self, draw: random.Random) -> Sample:
        names = ["".join(draw.choices(ascii_uppercase, k=5)) for _ in range(5)]
        value = str(draw.choice(_NUMBERS))
        sources = [value, *(f"VAR {name}" for name in names)]
        facts = [f"\n\nVAR {n} = {v}\n\n" for n, v in zip(names, sources, strict=False)]
        question = (
            f"\n\nQuestion: Find all variables that are assigned the value {value} in the text above. Answer: According to the "
            f"chain(s) of variable assignment in the text above, 5 variables are assigned the value {value}, they are:"
        )
        return self._sample(facts, [question], [names], 40, draw)

    def _common_words(self, draw: random.Random) -> Sample:
        """In a list ten words stand equally often, and as many others about once."""
        common, new_tokens = draw.sample(self.words, 10), 40
        others = set(re.findall(r"\b[a-z]{4,8}\b", self.tokenizer.decode(self.filler)))
        others = sorted(others.difference(common))
        question = self._tokens(
            "\n\nQuestion: What are the 10 most common words in the above list? Answer: The top 10 words that appear most often in the list are:"
        )
        room = self.length - len(question) - new_tokens
        repeats = 1 + room // 90  # 20 words of 4.5 tokens or more
        words = common * repeats + draw.choices(others, k=10 * repeats)
        draw.shuffle(words)
        text = "Below is a numbered list of words. Memorize the ones that appear most often.\n"
        text += "".join(f" {i}. {word}" for i, word in enumerate(words, 1))
        return Sample((self.begin + self._tokens(text))[:room], [question], [common], new_tokens)

    def _sample(self, facts, questions, answers, new_tokens: int, draw: random.Random) -> Sample:
        asked = [self._tokens(question) for question in questions]
        room = self.length - len(asked[0]) - new_tokens
        return Sample(self._hide(facts, room, draw), asked, answers, new_tokens)

    def _hide(self, facts: list[str], room: int, draw: random.Random) -> list[int]:
        """Returns `room` tokens: `begin`, and a passage of filler with the facts in their order at random places."""
        tokens = [self._tokens(fact) for fact in facts]
        room -= len(self.begin) + sum(map(len, tokens))
        last = start = draw.randrange(len(self.filler) - room + 1)
        text = list(self.begin)
        for place, fact in zip(sorted(draw.randrange(room) for _ in facts), tokens, strict=True):
            text += self.filler[last : start + place] + fact
            last = start + place
        return text + self.filler[last : start + room]

    def _tokens(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids


def recall(written: str, answer: list[str]) -> float:
    """Returns the share of the parts of an answer that the model has written, as RULER does."""
    return sum(part in written for part in answer) / len(answer)
