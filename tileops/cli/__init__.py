"""The commands of `python -m tileops`. They need the packages of the extra ``cli``."""
