"""Headers of foreign files: what a model is made of and where it lies. No torch."""
