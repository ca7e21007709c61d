"""Model architectures, one file each, built and filled with their weights."""
