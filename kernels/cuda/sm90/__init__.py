"""Kernels for NVIDIA Hopper GPUs (compute capability 9.0)."""
