"""The parts of `quire bench serve`: requests, when they are sent, to whom, and what came of it."""
