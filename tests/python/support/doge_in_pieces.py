"""A small Doge and batches for it, whole, padded and packed."""

import torch

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
    """input_ids, labels, and what describes padding or documents."""
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
