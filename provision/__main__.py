"""``python -m provision``."""

from provision.cli.main import main

main()
