"""Helpers around attention: masks, padding."""
