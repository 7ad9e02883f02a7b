"""A link between a site and the coordinator with little throughput, a delay and a deep buffer; it can be cut.

As a proxy it wants an HTTP CONNECT first, perhaps with a login. It can open TLS and encrypt again what it carries.
"""

import asyncio
import threading
from contextlib import suppress

PIECE = 2048  # bytes that are carried at a time


class SlowLink:
    """Listens at ``port`` and carries what comes to another port of this machine.

    Args:
        far: The other port.
        rate: Bytes per second, in each direction, over all connections.
        delay: Seconds that every byte is on its way.
        login: As a proxy: the value of Proxy-Authorization that is wanted; "" for none. None: not a proxy.
        tls: TLS contexts for the near and the far end, if it opens TLS.
    """

    def __init__(self, far, rate=1e9, delay=0.0, login=None, tls=(None, None)):
        self.far, self.rate, self.delay, self.login, self.tls = far, rate, delay, login, tls
        self.free = {"up": 0.0, "down": 0.0}  # when the link is free again
        self.carried = {"up": 0, "down": 0}  # bytes that came out at the other end
        self.cuts = {"up": [], "down": []}  # (bytes after which it breaks, the port to which it leads then)
        self.asked = []  # tunnels that were asked for
        self.ends, self.connections = set(), 0

    def __enter__(self):
        self.loop, ready = asyncio.new_event_loop(), threading.Event()

        async def start():
            self.server = await asyncio.start_server(self._accept, "127.0.0.1", 0, ssl=self.tls[0])
            self.port = self.server.sockets[0].getsockname()[1]

        def run():
            self.loop.run_until_complete(start())
            self.loop.call_soon(ready.set)  # from now on the loop can be stopped
            self.loop.run_forever()
            self.loop.run_until_complete(self._end())
            self.loop.close()

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()
        ready.wait()
        return self

    def __exit__(self, *_):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()

    async def _end(self):
        self.server.close()
        await asyncio.sleep(0.01)  # connections that came last are known, so that they are closed, too
        self._cut()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # connections that were broken are closed

    def cut(self):
        """Break all connections; what is on its way is lost. New ones can be made."""
        self.loop.call_soon_threadsafe(self._cut)

    def cut_after(self, count, way="up", far=None):
        """Break all connections when so many more bytes have gone over; then lead to another port, if one is given."""
        self.cuts[way].append((self.carried[way] + count, far or self.far))

    def _cut(self):
        for writer in self.ends:
            writer.transport.abort()
        self.free = dict.fromkeys(self.free, 0.0)

    async def _accept(self, reader, writer):
        self.ends.add(writer)
        self.connections += 1
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            if self.login is not None and not await self._tunnel(reader, writer):
                return
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.far, ssl=self.tls[1])
            self.ends.add(far_writer)
            await asyncio.gather(
                self._carry("up", reader, far_writer), self._carry("down", far_reader, writer), return_exceptions=True
            )
            far_writer.transport.abort()
            self.ends.discard(far_writer)
        writer.transport.abort()
        self.ends.discard(writer)

    async def _tunnel(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.asked.append(head.splitlines()[0])
        allowed = not self.login or f"Proxy-Authorization: {self.login}\r\n" in head
        writer.write(b"HTTP/1.1 200 Go\r\n\r\n" if allowed else b"HTTP/1.1 407 Login\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        if not allowed:
            writer.close()
        return allowed

    async def _carry(self, way, reader, writer):
        queue = asyncio.Queue()
        task = asyncio.ensure_future(self._deliver(way, queue, writer))
        with suppress(OSError):
            while data := await reader.read(PIECE):
                self.free[way] = max(self.loop.time(), self.free[way]) + len(data) / self.rate
                queue.put_nowait((self.free[way] + self.delay, data))
        queue.put_nowait((self.free[way] + self.delay, b""))
        await task

    async def _deliver(self, way, queue, writer):
        while True:
            at, data = await queue.get()
            if (early := at - self.loop.time()) > 0:
                await asyncio.sleep(early)
            if not data or writer.transport.is_closing():
                writer.transport.abort()
                return
            writer.write(data)
            self.carried[way] += len(data)
            if self.cuts[way] and self.carried[way] >= self.cuts[way][0][0]:
                _, self.far = self.cuts[way].pop(0)
                self._cut()
