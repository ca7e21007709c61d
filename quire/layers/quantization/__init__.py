"""How a linear layer stores and multiplies its weight: one method object per format."""
