"""Parts of several integrations. Nothing here is public."""
