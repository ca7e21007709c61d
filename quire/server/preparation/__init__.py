"""What lies between a request's body and the engine: reading, checking, rendering, tokenising."""
