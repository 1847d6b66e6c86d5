"""Masters: high-precision weights in the optimizer state, around any optimizer."""
