"""Adapters for other libraries, which `import flash_dmattn` does not import.

transformers/, vllm/, serving/, kvpress and torchtitan are adapters; _shared/ holds what several of them use. The other
modules have the names of version 1.x; packed_sequences.py serves these.
"""
