"""Adapters for other libraries. Nothing here is imported by `import flash_dmattn`."""
