"""Names that scripts written for vLLM import: `LoRARequest`."""
