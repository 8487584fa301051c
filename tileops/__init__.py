"""Mixture-of-Experts operators written in TileLang, for Hopper GPUs and for CPUs."""

from tileops import moe, targets

__version__ = "0.1.0.dev0"

__all__ = ["moe", "targets"]
