"""The page at `/`: static files that hold no data, and the one route that they read."""
