"""Model architectures, one file each, and the loading of their weights."""
