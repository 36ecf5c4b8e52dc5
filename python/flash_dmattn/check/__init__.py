"""Is this installation right? `python -m flash_dmattn check` compares it with double precision.

The oracle, the cases and the bound are those of the project's tests, which import them from here.
"""
