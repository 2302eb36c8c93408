"""Process sets."""

from collective_core.runtime.process_sets import ProcessSet as ProcessSet
from collective_core.runtime.process_sets import add_process_set as add_process_set
from collective_core.runtime.process_sets import global_process_set as global_process_set
from collective_core.runtime.process_sets import remove_process_set as remove_process_set
