"""The self check on pretended hosts."""

import sys

import common  # noqa: F401 - sets the host
from collective_core.check import main

sys.exit(main())
