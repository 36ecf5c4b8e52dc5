"""The commands of `python -m flash_dmattn`: check and info."""
