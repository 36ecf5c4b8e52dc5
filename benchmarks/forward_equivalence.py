"""Compares out and lse of a backend with double precision.

python benchmarks/forward_equivalence.py --test-type {all,cuda,triton,flex,cpu}
"""

from flash_dmattn.check.equivalence import main

if __name__ == "__main__":
    main("Compares out and lse of a backend with double precision.", ("out", "lse"))
