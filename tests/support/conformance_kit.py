"""What `meshrl conformance` says of a server, for the tests that show it servers which keep or break the contract."""

from __future__ import annotations

from meshrl.client.credentials import INSECURE, Credentials
from meshrl_conformance.command import examine_server

DEADLINE_S = 60.0


async def verdict(
    address: str, service: str, *, full: bool = False, credentials: Credentials = INSECURE
) -> tuple[dict[str, str], dict[str, str]]:
    """(what was found of each rule that is broken, why each rule was not checked) by the rules' ids."""
    results = await examine_server(address, service, full=full, deadline_s=DEADLINE_S, credentials=credentials)
    broken = {one.rule: one.found for one in results if one.result == "breaks"}
    return broken, {one.rule: one.found for one in results if one.result == "not checked"}
