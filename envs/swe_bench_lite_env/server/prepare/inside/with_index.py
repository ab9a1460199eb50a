"""Runs inside a sandbox: gives a command the package index on 127.0.0.1, where pip can reach it.

    with_index.py SOCKET PORT COMMAND [ARGUMENT...]

Every connection to the port goes to the socket. The exit status is the command's.
"""

import asyncio
import sys


async def main():
    socket, port, *command = sys.argv[1:]

    async def forward(reader, writer):
        while chunk := await reader.read(256 * 1024):
            writer.write(chunk)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()

    async def connect(reader, writer):
        try:
            there_reader, there_writer = await asyncio.open_unix_connection(socket)
        except OSError as error:
            print(f"with_index: {socket}: {error}", file=sys.stderr)
            writer.close()
            return
        try:
            await asyncio.gather(forward(reader, there_writer), forward(there_reader, writer))
        except OSError:
            pass  # one side hung up; the other hears it now
        finally:
            writer.close()
            there_writer.close()

    server = await asyncio.start_server(connect, "127.0.0.1", int(port), backlog=128)
    process = await asyncio.create_subprocess_exec(*command)
    status = await process.wait()
    server.close()
    return status if status >= 0 else 128 - status


sys.exit(asyncio.run(main()))
