"""A layer's scores learn associative recall with a fifth of the keys, only from the gradient of attention."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flash_dmattn import DynamicMaskAttention

LENGTH, PAIRS, WORDS, WIDTH, WINDOW, STEPS, BATCH = 48, 6, 64, 64, 9, 160, 16


class Model(nn.Module):
    """One layer of attention and an MLP over words. The embedding of a word includes a share of the previous word."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(2 * WORDS, WIDTH)
        nn.init.normal_(self.embedding.weight, std=0.5)
        self.previous = nn.Linear(WIDTH, WIDTH, bias=False)
        options = {"keep_window_size": WINDOW, "score": "gate", "rope": rotate}
        self.attention = DynamicMaskAttention(WIDTH, 2, **options)
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(3))
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, text):
        embedded = self.embedding(text)
        hidden = embedded + self.previous(F.pad(embedded, (0, 0, 1, -1)))
        hidden = hidden + self.attention(self.norms[0](hidden))
        hidden = hidden + self.mlp(self.norms[1](hidden))
        return self.norms[2](hidden) @ self.embedding.weight.t() / WIDTH**0.5


def rotate(query, key, positions):
    """Applies a rotary embedding."""
    half = query.shape[-1] // 2
    angles = positions[..., None, None] * 10000.0 ** (-torch.arange(half) / half)
    cos, sin = angles.cos(), angles.sin()

    def rotate_tensor(t):
        a, b = t.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    return rotate_tensor(query), rotate_tensor(key)


def draw(random):
    """Returns texts [BATCH, LENGTH], the places that ask [BATCH, PAIRS] and their answers.

    A text is filler with (key, value) pairs scattered over its first half. Its last quarter repeats the keys.
    """

    def distinct(high):
        return torch.rand(BATCH, high, generator=random).argsort(1)[:, :PAIRS]

    half, asked = WORDS // 2, LENGTH // 4
    text = torch.randint(WORDS, 2 * WORDS, (BATCH, LENGTH), generator=random)
    keys = distinct(half)
    values = half + torch.randint(half, keys.shape, generator=random)
    stated, places = 2 * distinct(LENGTH // 4), LENGTH - asked + distinct(asked)
    text.scatter_(1, stated, keys).scatter_(1, stated + 1, values).scatter_(1, places, keys)
    return text, places, values


def recall_after_training():
    """Returns the share of right answers over the last steps."""
    torch.manual_seed(0)
    random = torch.Generator().manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 7e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 7e-3, STEPS, pct_start=0.1)
    recall = []
    for _ in range(STEPS):
        text, places, answers = draw(random)
        logits = model(text).gather(1, places[..., None].expand(-1, -1, 2 * WORDS)).flatten(0, 1)
        optimizer.zero_grad()
        F.cross_entropy(logits, answers.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        recall.append((logits.argmax(-1) == answers.flatten()).float().mean().item())
    return sum(recall[-STEPS // 10 :]) / len(recall[-STEPS // 10 :])


@pytest.mark.usefixtures("one_thread")
def test_gates_learn_to_recall():
    """A window of the most recent keys recalls a tenth, and chance 1 of 32."""
    assert recall_after_training() >= 0.95
