"""A time that was measured while the kit's own process was held up is recognised."""

from __future__ import annotations

import asyncio
import time

from errata_conformance.server_side.stalls import Stalls


async def test_a_stall_of_the_event_loop_is_measured() -> None:
    async with Stalls() as stalls:
        await asyncio.sleep(0.02)
        time.sleep(0.2)  # noqa: ASYNC251 - the stall
        await asyncio.sleep(0.02)
    assert stalls.longest_s > 0.15
