"""Adasum: combining gradients, or the steps of optimizers, so that what points the same way is averaged and what does not is added."""
