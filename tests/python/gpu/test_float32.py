"""The Triton kernels compute float32 tensors on a GPU, in float32, or in tf32 where torch's flag permits it."""

import pytest
import torch

from flash_dmattn import flash_dmattn_func, flash_dmattn_varlen_func, is_available

pytestmark = [
    pytest.mark.skipif(not is_available("triton"), reason="float32 on a GPU takes Triton"),
]

N = 150
OPTIONS = {
    "causal": {},
    "per_query": {"keep_window_size": 20},
    "global": {"keep_window_size": 20, "selection": "global"},
    "mask": {"attn_mask": torch.rand(2, 1, N, N).tril() > 0.2, "keep_window_size": 20},
}


def results(device, options, dtype=torch.float32):
    torch.manual_seed(0)
    shapes = [(2, N, 4, 40), (2, N, 2, 40), (2, N, 2, 40), (2, 2, N)]
    leaves = [torch.randn(shape).to(device, dtype).requires_grad_() for shape in shapes]
    options = {k: x.to(device) if isinstance(x, torch.Tensor) else x for k, x in options.items()}
    q, k, v, bias = leaves
    out = flash_dmattn_func(q, k, v, attn_bias=bias, is_causal=True, **options)
    assert out.dtype == dtype
    return [t.cpu() for t in (out, *torch.autograd.grad(out.square().sum(), leaves))]


@pytest.mark.parametrize("name", OPTIONS)
def test_float32_on_a_gpu_equals_the_cpu(name):
    torch.testing.assert_close(
        results("cuda", OPTIONS[name]), results("cpu", OPTIONS[name]), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("name", OPTIONS)
def test_torch_flag_decides_the_precision_of_products(name, monkeypatch):
    exact = results("cpu", OPTIONS[name], torch.float64)
    for precision, least, most in [("ieee", 0, 2**-17), ("tf32", 2**-17, 2**-7)]:
        monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", precision)
        for ours, wanted in zip(results("cuda", OPTIONS[name]), exact, strict=True):
            error = (ours - wanted).norm() / wanted.norm()
            assert least <= error <= most, precision


def test_float32_packed_sequences_match_oracle():
    offsets = torch.tensor([0, 60, N])
    q, k, v = (torch.randn(N, heads, 32) for heads in (4, 2, 2))
    expected = flash_dmattn_varlen_func(q, k, v, offsets, offsets, is_causal=True)
    on_gpu = (t.cuda() for t in (q, k, v, offsets, offsets))
    out = flash_dmattn_varlen_func(*on_gpu, is_causal=True)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-5)


def test_float32_doge_equals_eager():
    transformers = pytest.importorskip("transformers")
    from flash_dmattn.integrations.transformers import enable_flash_dmattn

    config = transformers.DogeConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, keep_window_size=16,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.DogeForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.A)
    ids = torch.randint(0, 64, (2, 70))
    expected = enable_flash_dmattn(model)(ids, labels=ids).loss
    model.cuda()
    loss = model(ids.cuda(), labels=ids.cuda()).loss
    loss.backward()
    torch.testing.assert_close(loss.cpu(), expected, rtol=1e-4, atol=1e-5)
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
