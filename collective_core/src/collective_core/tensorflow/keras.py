"""``collective_core.keras`` by the name that Horovod has for it."""

import sys
from importlib import import_module

# It is above this package, whose modules import nothing of it.
sys.modules[__name__] = import_module("collective_core.keras")
