"""How a linear layer stores and multiplies its weight: one scheme object per format."""
