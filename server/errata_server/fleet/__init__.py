"""Several processes behind one address: a supervisor forks workers, each with a data directory of its own (a shard).

`routes` tells from a request whose it is, without any I/O; `acceptor` hands connections to their worker, `relay` the
frames of multiplexed sockets, `forwarder` single HTTP requests. `board` is the memory that all workers share.
"""

from .limits import count_of, shared_settings
from .supervisor import WorkerEnded, supervise

__all__ = ["WorkerEnded", "count_of", "shared_settings", "supervise"]
