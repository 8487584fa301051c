"""The in-tree kernels, one subpackage a target (links into the ``kernels/`` folder of the repository)."""
