"""Tool calls: told to models, enforced in their replies, and found there as text comes."""
