"""Provides the SDK: submit a run and watch it, or bring your own trainer.

async with Client() as client:
    run = await client.submit("run.toml")
    async for event in client.watch(run.run_id):
        print(event.kind, event.message)

A trainer claims a run and works under its lease (`Lease`). `SyncClient` is the same without asyncio.
"""

from ebbtide.client.client import Client
from ebbtide.client.lease import GatewayLease, Lease
from ebbtide.client.sync_client import SyncClient, SyncLease

__all__ = ["Client", "GatewayLease", "Lease", "SyncClient", "SyncLease"]
