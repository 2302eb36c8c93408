"""``horovod.run``: a function on several ranks."""

from collective_core.launch import run as run
