"""Optimizer states and params in few bits."""
