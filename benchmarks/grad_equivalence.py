"""Compares all gradients of a backend, the bias's too, with double precision.

python benchmarks/grad_equivalence.py --test-type {all,cuda,triton,flex,cpu}
"""

from flash_dmattn.check.equivalence import main

if __name__ == "__main__":
    main(
        "Compares all gradients of a backend, the bias's too, with double precision.",
        ("dq", "dk", "dv", "dbias"),
    )
