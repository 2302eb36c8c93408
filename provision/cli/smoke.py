"""`provision smoke` on the command line: parse, call one function, print."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from provision.cli.options import Data, Epochs, Hosts, Json, Limit, Np, Oversubscribe, inventory_of, passwords, with_options
from provision.cli.up import print_report
from provision.commands.smoke import verify
from provision.plan.options import SmokeOptions
from provision.remote import progress
from provision.report import model


@with_options(passwords=passwords)
def smoke(
    hosts: Hosts,
    limit: Limit = None,
    np: Np = None,
    oversubscribe: Oversubscribe = False,
    epochs: Epochs = None,
    data: Data = None,
    json_: Json = False,
    *,
    passwords: Mapping[str, str],
) -> None:
    """Run the training job alone, on hosts that `provision up` made ready."""
    inventory = inventory_of(hosts, limit)
    with progress.make() as shown:
        result = verify(inventory, SmokeOptions(np=np, epochs=epochs, data=data, oversubscribe=oversubscribe), shown, passwords)
    print_report(result, json_, model.commands_after(result, hosts, sys.argv[1:], limit=limit))
