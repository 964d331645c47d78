"""Decoding with a build: target, drafters, lossless verification."""
