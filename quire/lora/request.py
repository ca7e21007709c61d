"""`LoRARequest` under the module name that vLLM scripts import it from."""

from quire.protocol.adapter import LoRARequest

__all__ = ["LoRARequest"]
