"""`python -m flash_dmattn bench`: time and memory beside the rivals that this machine has.

benchmarks/*.py call the same cases, clocks and rivals.
"""
