"""From logits to tokens: masks, penalties, filters, random choice and logprobs, one file each."""
