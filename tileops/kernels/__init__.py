"""The in-tree kernels, one subpackage a target: links into the repository's ``kernels/`` folder."""
