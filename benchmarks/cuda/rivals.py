"""Times torch's scaled dot product attention backends on the dense causal cases of bench_attention."""

import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


def median_ms(body, repeats):
    times = []
    for i in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        body()
        end.record()
        end.synchronize()
        if i >= 2:
            times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def main():
    backends = {
        "flash-attention-2": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
    }
    for n, d in ((8192, 128), (32768, 128), (32768, 64)):
        q, k, v, g = (
            torch.randn(1, n, 16, d, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
            for _ in range(4)
        )
        for x in (q, k, v):
            x.requires_grad_()
        flops = 4 * d * n * (n + 1) / 2 * 16
        for name, backend in backends.items():
            with sdpa_kernel(backend):
                attention = torch.nn.functional.scaled_dot_product_attention
                with torch.no_grad():
                    forward = median_ms(lambda: attention(q, k, v, is_causal=True), 5)
                out = attention(q, k, v, is_causal=True)
                backward = median_ms(
                    lambda: torch.autograd.grad(out, (q, k, v), g, retain_graph=True), 5
                )
            print(
                f"{name:18} N{n} D{d} fwd {forward:8.3f} ms {flops / forward * 1e-9:6.1f}"
                f"  bwd {backward:8.3f} ms {2.5 * flops / backward * 1e-9:6.1f}"
            )
            sys.stdout.flush()


main()
