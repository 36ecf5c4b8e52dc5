"""What benchmarks/bench.py measures, how it times, and what it writes."""
