"""The processes of `quire serve`: how they start, are watched, restarted and stopped."""
