"""The C++ compiler behind TileLang's C target, and the vector level that kernels are built for.

A level is named, never ``native``: the name is part of the compile flags, these are part of
TileLang's cache key, and so machines that differ can share one cache folder.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache, partial

import tilelang
import torch

from tileops import compilation


@dataclass(frozen=True)
class Level:
    """An instruction set level as compilers name it, and the register tile that suits it.

    Attributes:
        name: The value of ``-march=``; empty on a machine of unknown architecture.
        features: What ``/proc/cpuinfo`` must list, beyond what the level below needs.
        lanes: Float32 values in one vector register.
        tile_m: Rows of the GEMM's register tile.
        tile_n: Columns of it: the accumulators, ``tile_m * tile_n``, and operands fit registers.
        flags: Compiler flags beside ``-march``.
    """

    name: str
    features: frozenset[str]
    lanes: int
    tile_m: int
    tile_n: int
    flags: tuple[str, ...] = ()


def _level(name: str, features: str, lanes: int, m: int, n: int, *flags: str) -> Level:
    return Level(name, frozenset(features.split()), lanes, m, n, flags)


_X86 = (
    _level("x86-64", "", 4, 4, 2),
    _level("x86-64-v2", "cx16 lahf_lm popcnt pni ssse3 sse4_1 sse4_2", 4, 4, 2),
    _level("x86-64-v3", "avx avx2 bmi1 bmi2 f16c fma abm movbe xsave", 8, 4, 2),
    _level(
        "x86-64-v4",
        "avx512f avx512bw avx512cd avx512dq avx512vl",
        *(16, 4, 4, "-mprefer-vector-width=512"),
    ),
)
_ARM = (
    _level("armv8-a", "", 4, 4, 4),
    _level("armv8.2-a", "crc32 atomics asimdrdm dcpop", 4, 4, 4),
)
_FAMILIES = {"x86_64": _X86, "amd64": _X86, "aarch64": _ARM, "arm64": _ARM}
_UNKNOWN = (_level("", "", 4, 4, 2),)

# Without a /proc/cpuinfo, what torch says of the processor.
_TORCH_CAPABILITY = {"AVX2": 2, "AVX512": 3}

# NaN, infinities and the sign of zero keep their meaning: no -ffast-math. Kernels read one buffer
# through integers of two widths, hence no strict aliasing.
_FLAGS = ("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-fno-strict-aliasing")

# GCC at -O3 unrolls short loops before it looks for vectors, and then finds none. Other compilers
# do not know its options.
_OPTIMISE = (("-O2", "-ftree-vectorize", "-fvect-cost-model=dynamic"), ("-O3",))


def _cpu_features() -> frozenset[str] | None:
    """Return the feature names of the first processor, or None where the system has no list."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                key, _, value = line.partition(":")
                if key.strip() in ("flags", "Features"):
                    return frozenset(value.split())
    except OSError:
        pass
    return None


def levels() -> tuple[Level, ...]:
    """Return the levels of this machine's architecture, lowest first; it may not have them all."""
    return _FAMILIES.get(platform.machine().lower(), _UNKNOWN)


@cache
def machine_levels() -> tuple[Level, ...]:
    """Return the levels this machine has, lowest first."""
    family = levels()
    features = _cpu_features()
    if features is None:
        capability = torch.backends.cpu.get_cpu_capability()
        return family[: 1 + (_TORCH_CAPABILITY.get(capability, 0) if family is _X86 else 0)]
    have = 1
    while have < len(family) and family[have].features <= features:
        have += 1
    return family[:have]


@cache
def _resolve(asked: str | None) -> Level:
    have = machine_levels()
    if not asked:
        return have[-1]
    for level in have:
        if level.name == asked:
            return level
    known = [level.name for level in have]
    raise ValueError(f"TILEOPS_CPU_LEVEL must be one of {known} on this machine, got {asked!r}")


@cache
def named(name: str) -> Level:
    """Return a level by its name, whether or not this machine has it.

    Raises:
        ValueError: If this machine's architecture has none of that name.
    """
    for level in levels():
        if level.name == name:
            return level
    known = [level.name for level in levels()]
    raise ValueError(f"this machine compiles for the levels {known}, not for {name!r}")


def level() -> Level:
    """Return the level to build for: the machine's, or the lower one ``TILEOPS_CPU_LEVEL`` names.

    Where builds are collected ahead of time, it is the one they are collected for.

    Raises:
        ValueError: If the variable names a level that this machine does not have, or builds are
            collected for one of another architecture.
    """
    ahead = compilation.collected_arch()
    return _resolve(os.environ.get("TILEOPS_CPU_LEVEL")) if ahead is None else named(ahead)


@cache
def _probe(asked: str | None, path: str | None, chosen: Level) -> tuple[list[str], str | None]:
    """Return the flags that the compiler takes, and why there are none."""
    # the search order is TileLang's
    names = [asked] if asked else ["g++", "clang++", "c++"]
    found = next(filter(None, (shutil.which(name, path=path) for name in names)), None)
    if found is None:
        what = f"CXX or CC is {asked!r}" if asked else "g++, clang++ or c++"
        return [], f'no C++ compiler found ({what}): install one, or use target="reference"'
    march = [f"-march={chosen.name}"] if chosen.name else []
    complaint = ""
    for optimise in _OPTIMISE:
        flags = [*optimise, *_FLAGS, *march, *chosen.flags]
        command = [found, "-std=c++17", "-fsyntax-only", *flags, "-x", "c++", os.devnull]
        probe = subprocess.run(command, capture_output=True, text=True, check=False)
        if probe.returncode == 0:
            return flags, None
        complaint = probe.stderr.strip()
    return [], (
        f"{found} does not build for {chosen.name or 'this machine'} ({complaint}): install a "
        f'newer one, lower TILEOPS_CPU_LEVEL, or use target="reference"'
    )


def _found(chosen: Level) -> tuple[list[str], str | None]:
    asked = os.environ.get("CXX") or os.environ.get("CC")
    return _probe(asked, os.environ.get("PATH"), chosen)


def flags(name: str) -> list[str]:
    """Return the compiler flags of the level of that name."""
    return _found(named(name))[0]


def refusal() -> str | None:
    """Return why no kernel can be compiled here, or None if one can."""
    try:
        return _found(level())[1]
    except ValueError as error:
        return str(error)


jit = partial(
    compilation.jit,
    why_not=refusal,
    target="c",
    execution_backend="cython",
    # every kernel keeps its own indices inside its buffers; a check of each access would stop the
    # compiler from using vectors
    pass_configs={tilelang.PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS: True},
)
"""The decorator of builders, which take the level's name and annotate its `flags`."""
