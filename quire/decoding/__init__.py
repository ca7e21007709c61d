"""From logits to tokens: masks, penalties, filters, sampling and logprobs."""
