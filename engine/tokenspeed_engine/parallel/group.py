"""Connects the ranks of one machine: by gloo on CPUs, by NCCL on GPUs.

The groups are the engine's own and not the process's default one, so that a process can have several engines.
"""

import socket
from datetime import timedelta
from typing import Any, cast

import torch
from torch import distributed
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from tokenspeed_engine.parallel.ranks import Group

LOCALHOST = "127.0.0.1"
TIMEOUT = timedelta(minutes=30)
"""That ranks wait for each other, as long as a first step may take to compile on one of them."""


def open_store() -> TCPStore:
    """Where ranks find each other, on a free port of the loopback interface."""
    listener = socket.create_server((LOCALHOST, 0))  # by itself the store would listen on all interfaces
    port = listener.getsockname()[1]
    return TCPStore(LOCALHOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def join_store(port: int) -> TCPStore:
    """The store that another process opened on `port`."""
    return TCPStore(LOCALHOST, port, is_master=False)


def connect(store: Store, rank: int, size: int, device: torch.device) -> Group:
    """The group of `size` ranks, `device` being this one's. Returns when all are there."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        group: Any = distributed.ProcessGroupNCCL(store, rank, size, distributed.ProcessGroupNCCL.Options())
    else:
        options = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname=LOCALHOST)]
        options._timeout = TIMEOUT
        group = distributed.ProcessGroupGloo(store, rank, size, options)
    # Connections are made by the first call; a CUDA graph cannot record that.
    group.allreduce([torch.zeros(1, device=device)]).wait()
    return cast(Group, group)
