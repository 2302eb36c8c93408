"""`provision smoke` on the command line: parse, call one function, print."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from provision.cli.options import Hosts, Json, Limit, inventory_of, passwords, smoke_options, with_options
from provision.cli.up import print_report
from provision.commands.smoke import verify
from provision.plan.options import SmokeOptions
from provision.remote import progress
from provision.report import model


@with_options(options=smoke_options, passwords=passwords)
def smoke(hosts: Hosts, limit: Limit = None, json_: Json = False, *, options: SmokeOptions, passwords: Mapping[str, str]) -> None:
    """Run the training job alone, on hosts that `provision up` made ready."""
    inventory = inventory_of(hosts, limit)
    with progress.make() as shown:
        result = verify(inventory, options, shown, passwords)
    print_report(result, json_, model.commands_after(result, inventory.argument, sys.argv[1:], limit=limit))
