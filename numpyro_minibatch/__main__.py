"""The command line for a run in a folder: its progress, and export to a file.

``python -m numpyro_minibatch show FOLDER`` and ``export FOLDER FILE``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from numpyro_minibatch.diagnostics import diagnose
from numpyro_minibatch.sampling import export_run, open_run
from numpyro_minibatch.sampling._reading import progress_of

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the progress of a run, or export the run; returns the exit status.

    :param arguments: the words after the name of the program.
    """
    parser = argparse.ArgumentParser(prog="python -m numpyro_minibatch")
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="progress, summary and advice of a run")
    show.add_argument("folder", help="the folder given to sample(out=...)")
    export = commands.add_parser("export", help="write a run to one file")
    export.add_argument("folder", help="the folder given to sample(out=...)")
    export.add_argument("file", help="a name that ends in .nc (netCDF) or .zarr")
    options = parser.parse_args(arguments)
    try:
        if options.command == "export":
            export_run(options.folder, options.file)
            return 0
        print(progress_of(options.folder))
        idata = open_run(options.folder)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(_summary(idata))
    print(diagnose(idata))
    return 0


def _summary(idata: object) -> str:
    import arviz as az  # here because it takes long and announces ArviZ 1

    return str(az.summary(idata))


if __name__ == "__main__":
    sys.exit(main())
