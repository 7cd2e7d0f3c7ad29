"""One training step: the passes of this rank's stages, and their gradients."""
