"""A client process of the soak, which is killed and started again: calls for ever, and notes what was acknowledged.

python -m tests.cluster.soak_client ADDRESS RUNTIME NOTES PREFIX
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

import ray

from actors.runtime import Runtime
from tests.cluster.soak_apps import Witness

KEYS = 8


async def run(runtime: Runtime, notes: int, prefix: str) -> None:
    witnesses = runtime.namespace(Witness)

    async def caller(key: str) -> None:
        number = 0
        while True:
            token = f"{os.getpid()}/{number}"
            count, seen = await witnesses.get(key).apply(token)
            os.write(notes, (json.dumps([key, token, count, seen]) + "\n").encode())
            number += 1
            await asyncio.sleep(0.05)

    await asyncio.gather(*(caller(f"{prefix}-{number}") for number in range(KEYS)))


if __name__ == "__main__":
    address, name, path, prefix = sys.argv[1:]
    ray.init(address=address, logging_level="ERROR", log_to_driver=False)
    asyncio.run(run(Runtime.connect(name), os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), prefix))
