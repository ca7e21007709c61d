"""Counters and histograms of the engine, cheap enough to keep on every step. No torch."""
