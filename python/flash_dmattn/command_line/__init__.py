"""The commands of `python -m flash_dmattn`: check, info and serve."""
