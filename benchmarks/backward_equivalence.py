"""Compares dq, dk and dv of a backend with double precision.

python benchmarks/backward_equivalence.py --test-type {all,cuda,triton,flex,cpu}
"""

from flash_dmattn.check.equivalence import main

if __name__ == "__main__":
    main("Compares dq, dk and dv of a backend with double precision.", ("dq", "dk", "dv"))
