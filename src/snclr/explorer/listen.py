"""The port of the explorer, without the imports of its server."""

import os
import socket

from snclr.errors import UserError


def open_socket(port: int) -> socket.socket:
    """Listen on 127.0.0.1; with port 0 the system chooses one. UserError if the port is taken."""
    if not 0 <= port <= 65_535:
        raise UserError(f"--port must be from 0 to 65535, not {port}; 0 chooses a free one")
    try:  # a browser that connects before the server accepts waits instead of being refused
        return socket.create_server(("127.0.0.1", port), backlog=128)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise UserError(f"port {port} cannot be used ({reason}). Choose another --port.") from error
