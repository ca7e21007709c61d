"""`api_server`, under the path that users of vLLM know."""
