"""The 1.x module of this name."""
