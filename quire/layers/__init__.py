"""Modules that models are made of. They know about ranks and quantisation, models do not."""
