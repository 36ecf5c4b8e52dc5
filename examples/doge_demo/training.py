"""Makes and trains the demo's model, and generates text with it."""

import math
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from tqdm import tqdm
from transformers import DogeConfig, DogeForCausalLM

from flash_dmattn.integrations.transformers import DynamicMaskCache, enable_flash_dmattn
from flash_dmattn.integrations.transformers.compat import CACHE

from .corpus import Corpus, even_batch, random_batch

_LEARNING_RATE = 2e-3
_WARMUP_STEPS = 10
_HELD_OUT_SEQUENCES = 8


def make_model(context: int, window: int, layers: int = 4) -> DogeForCausalLM:
    """Returns a Doge model over bytes with 0.8 million parameters per layer and exact selection by intervals."""
    config = DogeConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        keep_window_size=window,
        initializer_range=0.06,  # 1 / sqrt(hidden_size): learns faster in so few steps than 0.02
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return enable_flash_dmattn(DogeForCausalLM(config))


@dataclass
class History:
    """The record of a training."""

    bits_per_byte: list[float] = field(default_factory=list)  # loss of every step's batch
    seconds: float = 0.0
    bytes_seen: int = 0
    gradients_checked: int = 0

    @property
    def bytes_per_second(self) -> float:
        return self.bytes_seen / self.seconds


def train(
    model: DogeForCausalLM,
    corpus: Corpus,
    *,
    steps: int,
    seconds: float,
    context: int,
    batch_size: int,
    seed: int,
) -> History:
    """Trains in place for `steps` steps, or fewer when `seconds` are over.

    Raises:
        FloatingPointError: a gradient is not finite; the message names step and parameter.
    """
    generator = torch.Generator().manual_seed(seed)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=_LEARNING_RATE, betas=(0.9, 0.95))
    history = History()
    model.train()
    began = time.perf_counter()
    with tqdm(total=steps, desc="training", unit="step", dynamic_ncols=True) as bar:
        for step in range(steps):
            progress = max(step / steps, history.seconds / seconds)
            if progress >= 1:
                break
            for group in optimizer.param_groups:
                group["lr"] = _LEARNING_RATE * _schedule(step, progress)
            batch = random_batch(corpus.training, batch_size, context, generator)
            batch = batch.to(model.device)
            with precision_of(model.device):
                loss = model(batch, labels=batch).loss
            loss.backward()
            history.gradients_checked += check_gradients(model, step)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

            history.bits_per_byte.append(loss.item() / math.log(2))
            history.bytes_seen += batch.numel()
            history.seconds = time.perf_counter() - began
            bar.set_postfix_str(
                f"loss {loss.item():.3f}, {history.bytes_per_second:,.0f} bytes/s", refresh=False
            )
            bar.update()
    return history


def precision_of(device: torch.device) -> AbstractContextManager:
    """Returns autocast to bfloat16 on a GPU, whose attention kernels do not accept float32."""
    if device.type != "cuda":
        return nullcontext()
    return torch.autocast("cuda", torch.bfloat16)


def check_gradients(model: torch.nn.Module, step: int) -> int:
    """Returns the number of gradients. Raises FloatingPointError if one is not finite."""
    named = [(n, p.grad) for n, p in model.named_parameters() if p.grad is not None]
    for name, gradient in named:
        if not gradient.isfinite().all():
            raise FloatingPointError(f"step {step}: the gradient of {name} is not finite")
    return len(named)


@torch.no_grad()
def held_out_bits_per_byte(model: DogeForCausalLM, corpus: Corpus, context: int) -> float:
    """Returns the mean over sequences spread evenly over the held-out files."""
    model.eval()
    with precision_of(model.device):
        losses = [
            model(ids[None], labels=ids[None]).loss.item()
            for ids in even_batch(corpus.held_out, _HELD_OUT_SEQUENCES, context).to(model.device)
        ]
    return sum(losses) / len(losses) / math.log(2)


def write_text(model: DogeForCausalLM, prompt: str, length: int, seed: int) -> str:
    """Returns the prompt and the `length` bytes that the model generates after it."""
    model.eval()
    torch.manual_seed(seed)
    ids = torch.tensor([list(prompt.encode())], device=model.device)
    with precision_of(model.device):
        written = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            **{CACHE: DynamicMaskCache(model.config)},
            max_new_tokens=length,
            do_sample=True,
            temperature=0.8,
            top_k=40,
        )
    return bytes(written[0].tolist()).decode(errors="replace")


def _schedule(step: int, progress: float) -> float:
    """Returns the factor of the learning rate: a linear warm-up, then a cosine down to a tenth."""
    warmup = min(1.0, (step + 1) / _WARMUP_STEPS)
    return warmup * (0.55 + 0.45 * math.cos(math.pi * progress))
