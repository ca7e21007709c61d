"""`quire quantize`: quantised checkpoints of models, written as folders that other engines read."""
