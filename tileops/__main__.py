"""The command line: `python -m tileops COMMAND`."""

import sys

try:
    import psutil  # noqa: F401
    import pydantic  # noqa: F401
    import rich  # noqa: F401
    import typer  # noqa: F401
    import yaml  # noqa: F401
except ModuleNotFoundError as error:
    sys.exit(
        f"the command line needs more packages, {error.name} for one: "
        f"python -m pip install psutil pydantic pyyaml rich typer"
    )

from tileops.cli import bench, machine, verify, warmup  # noqa: E402, F401  (each adds its commands)
from tileops.cli.app import app  # noqa: E402

if __name__ == "__main__":
    app()
