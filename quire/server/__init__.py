"""HTTP: the OpenAI routes and their processes. Imported only where a server runs."""
