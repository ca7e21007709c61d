"""HTTP: the routes of all protocols and their processes. Imported only where a server runs."""
