#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Relays TCP connections and holds every byte back for a time, in both directions: a long link
where the kernel has no netem.

    delaying_relay.py LISTEN_HOST:PORT TARGET_HOST:PORT

Each line of input is the delay each way from then on, in milliseconds; the end of input ends it.
Prints "ready" once it listens, and a line for each delay it has taken over.
"""

import asyncio
import sys

CHUNK = 64 * 1024
IN_FLIGHT_MAX = 1024  # chunks of one direction that are held back at a time


class Relay:
    def __init__(self, target):
        self.target = target
        self.delay_s = 0.0
        self.tasks = set()

    async def read(self, reader, queue):
        try:
            while data := await reader.read(CHUNK):
                await queue.put((asyncio.get_running_loop().time() + self.delay_s, data))
        except OSError:
            pass
        await queue.put((asyncio.get_running_loop().time() + self.delay_s, b""))

    async def write(self, queue, writer):
        while True:
            due, data = await queue.get()
            await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
            if not data:
                return
            writer.write(data)
            await writer.drain()

    async def pump(self, reader, writer):
        queue = asyncio.Queue(IN_FLIGHT_MAX)
        reading = asyncio.create_task(self.read(reader, queue))
        try:
            await self.write(queue, writer)
        except OSError:
            pass
        finally:
            reading.cancel()

    async def accept(self, reader, writer):
        try:
            far_reader, far_writer = await asyncio.open_connection(*self.target)
        except OSError:
            return writer.close()
        # The end of one direction ends the connection: gRPC closes both at once.
        ways = [asyncio.create_task(self.pump(reader, far_writer)),
                asyncio.create_task(self.pump(far_reader, writer))]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        far_writer.close()
        writer.close()

    async def commands(self):
        while line := await asyncio.to_thread(sys.stdin.readline):
            self.delay_s = float(line) / 1e3
            print(f"{self.delay_s * 1e3:g} ms", flush=True)


def split(address):
    host, port = address.rsplit(":", 1)
    return host, int(port)


async def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    relay = Relay(split(sys.argv[2]))
    server = await asyncio.start_server(relay.accept, *split(sys.argv[1]))
    print("ready", flush=True)
    await relay.commands()
    server.close()


if __name__ == "__main__":
    asyncio.run(main())
