"""Cases, timing and records of benchmarks/bench.py."""
