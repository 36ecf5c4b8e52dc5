"""The installation check: `python -m flash_dmattn check` compares the backends with double precision.

The oracle, the cases and the bound are those of the project's tests, which import them from here.
"""
