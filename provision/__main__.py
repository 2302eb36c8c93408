"""The `provision` program, and ``python -m provision``."""

import os
import sys


def main() -> None:
    """Entry point: a Ctrl-C while the command line is still loading is one line, too."""
    try:
        from provision.cli.main import main as run
    except KeyboardInterrupt:
        os.write(2, b"provision: interrupted\n")
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
