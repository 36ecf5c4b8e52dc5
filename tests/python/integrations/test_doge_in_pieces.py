"""A Doge whose sequences are split over ranks has the same loss, gradients and training as one process."""

import copy

import pytest
import torch
import torch.distributed as dist

from doge_in_pieces import compare_generation, compare_step, make_doge, piece_loss, whole_loss
from processes import run_in_processes

pytest.importorskip("transformers.models.doge", reason="transformers with Doge is not installed")
pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")


def compare_doge(rank, kind, **options):
    model, pieces = make_doge(), make_doge(context_parallel=dist.group.WORLD)
    learned = compare_step(model, pieces, kind, 3e-5, **options)
    assert set(learned) == {name for name, _ in model.named_parameters()}


def compare_all(rank):
    for kind in ("whole", "padded", "packed"):
        compare_doge(rank, kind)
    compare_doge(rank, "packed", checkpointed=True)
    if dist.get_world_size() == 2:
        compare_doge(rank, "packed", compiled=True)
        compare_training(rank)
    compare_generation(
        rank, make_doge().eval(), make_doge(context_parallel=dist.group.WORLD).eval()
    )
    copies_and_errors(rank)


def compare_training(rank):
    """Compares the losses of 12 steps on padded and packed batches, within rounding."""
    from flash_dmattn.distributed import ContextParallel

    model, pieces = make_doge(), make_doge(context_parallel=dist.group.WORLD)
    context = ContextParallel(dist.group.WORLD)
    optimizers = [torch.optim.SGD(m.parameters(), 0.05, momentum=0.9) for m in (model, pieces)]
    losses = []
    for step in range(12):
        kind, seed = ("packed", "padded")[step % 2], step % 2  # two batches, which it learns
        loss, part = whole_loss(model, kind, seed), piece_loss(pieces, context, kind, seed)
        total = part.detach().clone()
        dist.all_reduce(total)
        losses.append((loss.item(), total.item()))
        for m, value, optimizer in zip((model, pieces), (loss, part), optimizers, strict=True):
            optimizer.zero_grad()
            value.backward()
            if m is pieces:
                for parameter in m.parameters():
                    dist.all_reduce(parameter.grad)
            optimizer.step()
    one, several = torch.tensor(losses).T
    assert one[-4:].mean() < one[:4].mean()
    torch.testing.assert_close(several, one, rtol=2e-4, atol=0)


def copies_and_errors(rank):
    dist.set_debug_level(dist.DebugLevel.INFO)  # ranks compare the arguments of every call
    model = make_doge(context_parallel=dist.group.WORLD)
    copy.deepcopy(model)
    tokens = torch.zeros(1, 8, dtype=torch.long)
    positions = torch.arange(8 * rank, 8 * rank + 8)[None]
    with pytest.raises(ValueError, match="position_ids: got None with context parallelism"):
        model(tokens)
    with pytest.raises(ValueError, match="shift_labels: got None"):
        model(tokens, position_ids=positions, labels=tokens)
    with pytest.raises(ValueError, match="num_items_in_batch: got None"):
        model(tokens, position_ids=positions, labels=tokens, shift_labels=tokens)
    with pytest.raises(ValueError, match="attention_mask: got"):
        model(tokens, position_ids=positions, attention_mask=torch.ones(1, 1, 8, 8).bool())
    with pytest.raises(ValueError, match="output_router_logits: got True"):
        model(tokens, position_ids=positions, output_router_logits=True)
    ranks_that_disagree_raise(model, tokens, positions, odd=int(rank == 0))
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="attn_implementation: got 'eager' with context"):
        model(tokens, position_ids=positions)


def ranks_that_disagree_raise(model, tokens, positions, odd):
    """Checks that each call raises. Without the error, ranks would wait, or the loss would differ from that of one process."""
    ones, loss = torch.ones(1, 8, dtype=torch.long), {"labels": tokens, "shift_labels": tokens}
    different = {
        "attention_mask=": {"attention_mask": ones} if odd else {},
        "num_items_in_batch=": {**loss, "num_items_in_batch": torch.tensor(8 + odd)},
        "labels=": {**loss, "num_items_in_batch": 8} if odd else {},
    }
    for words, options in different.items():
        with pytest.raises(ValueError, match=f"ranks differ: got .*{words}"):
            model(tokens, position_ids=positions, **options)
    with pytest.raises(ValueError, match="ranks differ: got .*tokens="):
        model(tokens[:, odd:], position_ids=positions[:, odd:])
    on_others = r"invalid arguments on ranks \[0\]"
    with pytest.raises(ValueError, match="shift_labels: got" if odd else on_others):
        model(tokens, position_ids=positions, **({"labels": tokens} if odd else {}))
    with pytest.raises(ValueError, match="position_ids: got" if odd else on_others):
        model(tokens, **({} if odd else {"position_ids": positions}))


@pytest.mark.parametrize("count", [2, 3])
def test_model_and_training_equal_one_process(count):
    run_in_processes(count, compare_all)
