"""A small Doge and batches for it, whole, padded and packed, and their losses."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

VOCABULARY, N, BATCH = 97, 96, 2


def make_doge(**settings):
    from transformers import DogeConfig, DogeForCausalLM

    from flash_dmattn.integrations.transformers import enable_flash_dmattn

    torch.manual_seed(0)
    config = DogeConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, keep_window_size=24, max_position_embeddings=4096, pad_token_id=None,
    )  # fmt: skip
    model = DogeForCausalLM(config)
    with torch.no_grad():  # scores that differ
        for name, parameter in model.named_parameters():
            if name.endswith(".A"):
                parameter.normal_()
    return enable_flash_dmattn(model, **settings).train()


def batch_of(kind, seed=7):
    """Returns input_ids, labels, and the arguments that describe padding or documents."""
    tokens = torch.randint(VOCABULARY, (BATCH, N), generator=torch.Generator().manual_seed(seed))
    labels, described = tokens.clone(), {}
    if kind == "padded":
        mask = torch.ones(BATCH, N, dtype=torch.long)
        mask[0, N - N // 3 :] = 0
        labels = labels.masked_fill(mask == 0, -100)
        described = {"attention_mask": mask}
    elif kind == "packed":
        begins = torch.tensor([[0, 31, 40], [0, 55, 94]])
        positions = torch.stack([torch.arange(N) - max_before(row.tolist()) for row in begins])
        labels = labels.masked_fill(positions == 0, -100)
        described = {"position_ids": positions}
    return tokens, labels, described


def max_before(begins):
    return torch.tensor([max(b for b in begins if b <= i) for i in range(N)])


def whole_loss(model, kind, seed=7):
    tokens, labels, described = batch_of(kind, seed)
    return model(tokens, labels=labels, use_cache=False, **described).loss


def piece_loss(model, context, kind, seed=7):
    """Returns this rank's part of the loss; the parts of all ranks add up to the whole."""
    tokens, labels, described = batch_of(kind, seed)
    piece = context.shard(tokens, labels, **described)
    mask = {} if piece.key_mask is None else {"attention_mask": piece.key_mask}
    return model(
        piece.input_ids,
        position_ids=piece.position_ids,
        labels=piece.shift_labels,
        shift_labels=piece.shift_labels,
        num_items_in_batch=(F.pad(labels, (0, 1), value=-100)[:, 1:] != -100).sum(),
        **mask,
    ).loss


def compare_step(model, pieces, kind, tolerance, checkpointed=False, compiled=False):
    """Compares loss and gradients of a model with those of its copy, for which each rank has pieces of the sequences.

    tolerance: largest error of a gradient, relative to its largest element.
    Returns {parameter name: largest element of its gradient}.
    """
    from flash_dmattn.distributed import ContextParallel

    loss = whole_loss(model, kind)
    loss.backward()
    if checkpointed:
        pieces.gradient_checkpointing_enable({"use_reentrant": False})
    if compiled and dist.get_rank():
        # One layer on the rank that sees another rank's keys, because compiling takes long.
        # Other tests compile the exchange further.
        pieces.model.layers[-1].compile(fullgraph=True, backend="eager")
    part = piece_loss(pieces, ContextParallel(dist.group.WORLD), kind)
    part.backward()
    total = part.detach().clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total, loss.detach(), rtol=1e-5, atol=0)
    largest = {}
    for (name, parameter), other in zip(pieces.named_parameters(), model.parameters(), strict=True):
        assert (parameter.grad is None) == (other.grad is None), name
        if parameter.grad is None:
            continue
        dist.all_reduce(parameter.grad)
        largest[name] = other.grad.abs().max()
        assert (parameter.grad - other.grad).abs().max() <= tolerance * largest[name], name
    return largest


@torch.no_grad()
def compare_generation(rank, model, pieces):
    """Reads a prompt in pieces, after which every rank continues alone from the end of its piece."""
    from flash_dmattn.distributed import ContextParallel
    from flash_dmattn.integrations.transformers import DynamicMaskCache, enable_flash_dmattn

    tokens, _, _ = batch_of("whole")
    piece = ContextParallel(dist.group.WORLD).shard(tokens)
    assert dist.get_world_size() * piece.input_ids.shape[1] == N
    caches = DynamicMaskCache(pieces.config), DynamicMaskCache(model.config)
    output = pieces(piece.input_ids, position_ids=piece.position_ids, past_key_values=caches[0])
    end = (rank + 1) * piece.input_ids.shape[1]
    expected = model(tokens[:, :end], past_key_values=caches[1]).logits[:, -1:]
    assert caches[0].get_seq_length() == end == caches[1].get_seq_length()
    logits = output.logits[:, -1:]
    for _ in range(2):
        enable_flash_dmattn(pieces)  # whole sequences again
    for position in range(end, end + 6):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        token, where = logits.argmax(-1), torch.full((BATCH, 1), position)
        logits, expected = (
            m(token, position_ids=where, past_key_values=cache).logits
            for m, cache in zip((pieces, model), caches, strict=True)
        )
