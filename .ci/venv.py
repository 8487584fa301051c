"""Make the virtual environment that the Makefile runs in: `python .ci/venv.py FOLDER EXTRA...`.

Installs the package in place with the extras named, at the versions of constraints.txt, and notes
that in the folder: a second call finds the note and does nothing. Any Python from 3.7 on runs this
file, so that one too old for the package is told so.
"""

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys

PINS = "constraints.txt"
OLDEST, NEWEST = (3, 11), (3, 13)
COMPILERS = ("g++", "clang++", "c++")  # TileLang's, where CXX and CC name none
CPU_INDEX = os.environ.get("TORCH_CPU_INDEX", "https://download.pytorch.org/whl/cpu")


def main(folder, extras):
    """Bring ``folder`` up to date, or exit with one line that says what is missing."""
    missing = what_is_missing(extras)
    if missing:
        sys.exit(missing)
    python = os.path.join(folder, "bin", "python")
    note = os.path.join(folder, "installed.json")
    have = read(note)
    make_venv(folder, ours=bool(have))
    state = {"root": os.getcwd(), "python": sys.version, "files": digest("pyproject.toml", PINS)}
    same = all(have.get(key) == value for key, value in state.items())
    if same and set(extras) <= set(have["extras"]):
        return
    # what another target of the Makefile installed stays usable
    state["extras"] = sorted(set(extras) | set(have.get("extras", [])))
    say("installing the packages: one to five minutes, 2 GB on disk, 5 with CUDA")
    pip = Pip(python, os.path.join(folder, "pip.log"))
    pip.install("pip")
    if not has_nvidia_driver():
        install_cpu_torch(pip)
    elif not has_nvcc():
        state["extras"] = sorted({*state["extras"], "cuda"})
    pip.install("-e", f".[{','.join(state['extras'])}]")
    with open(note, "w") as file:
        json.dump(state, file)


def make_venv(folder, ours):
    """Make the virtual environment unless it is there; only one of ours is made anew."""
    wanted, found = sys.version.split()[0], None
    if os.path.exists(os.path.join(folder, "pyvenv.cfg")):
        with open(os.path.join(folder, "pyvenv.cfg")) as config:
            found = re.search(r"^version(?:_info)? *= *([\d.]+)", config.read(), re.M).group(1)
    elif os.path.exists(folder):
        sys.exit(f"{folder} is no virtual environment: move it away or pass VENV=folder")
    if found and found.startswith(wanted):
        return
    if found and not ours:
        sys.exit(f"{folder} has Python {found}, not {wanted}: delete it or pass VENV=folder")
    say(f"making the virtual environment {folder} for Python {wanted}")
    if subprocess.call([sys.executable, "-m", "venv", "--clear", folder]):
        shutil.rmtree(folder, ignore_errors=True)
        sys.exit(f"could not make the virtual environment {folder}")


def what_is_missing(extras):
    """Return in one line what this machine lacks, or None."""
    version = sys.version_info[:2]
    name = f"Python {version[0]}.{version[1]}"
    if not OLDEST <= version <= NEWEST:
        names = [f"python3.{minor}" for minor in range(NEWEST[1], OLDEST[1] - 1, -1)]
        found = next(filter(runs, names), names[0])
        word = "old" if version < OLDEST else "new"
        return f"{name} is too {word}, 3.{OLDEST[1]} to 3.{NEWEST[1]} work: pass PYTHON={found}"
    if not all(importlib.util.find_spec(module) for module in ("venv", "ensurepip")):
        package = f"python{version[0]}.{version[1]}-venv"
        return f"{name} lacks its venv module: install it (apt-get install {package})"
    asked = os.environ.get("CXX") or os.environ.get("CC")
    if extras != ["docs"] and not any(map(shutil.which, [asked] if asked else COMPILERS)):
        return "no C++ compiler, which builds the kernels: install g++ (apt-get install g++)"
    return None


def runs(python):
    """Return whether there is an interpreter of that name."""
    command = [python, "-c", ""]
    return bool(shutil.which(python)) and not subprocess.call(command, stderr=subprocess.DEVNULL)


def install_cpu_torch(pip):
    """Without an NVIDIA driver, spare the user the gigabytes of a torch that is built for CUDA."""
    with open(PINS) as pins:
        version = re.search(r"^torch==(\S+)", pins.read(), re.MULTILINE).group(1)
    known = pip.output("index", "versions", "torch")
    if version + "+cpu" in known or "INSTALLED: " + version in known:
        return
    say(f"  no NVIDIA driver: taking torch's CPU build from {CPU_INDEX}")
    if not pip.try_install("--no-deps", "--retries", "1", "--index-url", CPU_INDEX, "torch"):
        say("  that failed: taking the default build, which brings several GB for CUDA")


def has_nvidia_driver():
    """Return whether torch could find a GPU here."""
    return os.path.exists("/proc/driver/nvidia/version") or bool(shutil.which("nvidia-smi"))


def has_nvcc():
    """Return whether a CUDA toolkit is installed where TileLang looks for one."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return bool(shutil.which("nvcc")) or os.path.exists(os.path.join(home, "bin", "nvcc"))


class Pip:
    """The pip of a virtual environment. What it prints goes to a log, the news to the terminal."""

    def __init__(self, python, log):
        self.command = [python, "-m", "pip", "--disable-pip-version-check"]
        self.log = log

    def output(self, *args):
        """Run a pip command and return what it prints."""
        command = subprocess.run([*self.command, *args], capture_output=True)
        return command.stdout.decode()

    def install(self, *args):
        """Install, or exit with the end of the log."""
        if not self.try_install(*args):
            with open(self.log) as log:
                sys.stderr.write("".join(log.readlines()[-15:]))
            sys.exit(f"pip could not install {args[-1]}; all that it printed is in {self.log}")

    def try_install(self, *args):
        """Install, naming the large downloads as they start; return whether that worked."""
        command = [*self.command, "install", "--progress-bar", "off", "-c", PINS, *args]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        with open(self.log, "w") as log:
            for raw in process.stdout:
                line = raw.decode(errors="replace")
                log.write(line)
                if re.search(r"^\s*Downloading .*\((\d\d+\.\d MB|\d{3,} MB|.* GB)", line):
                    say("  " + line.strip())
                elif line.startswith("Installing collected packages") and "," in line:
                    say(f"  unpacking {line.count(',') + 1} packages")
        return process.wait() == 0


def digest(*paths):
    """Return a hash of what the files hold."""
    content = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            content.update(file.read())
    return content.hexdigest()


def read(path):
    """Return the note at ``path``, or an empty one."""
    if not os.path.exists(path):
        return {}
    with open(path) as file:
        return json.load(file)


def say(message):
    """Print a line at once, also into a pipe."""
    print(message, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
