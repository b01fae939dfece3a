"""The command `python -m models.component_files RUN FOLDER` exports a decomposition."""

import sys

from models.decomposition.export import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
