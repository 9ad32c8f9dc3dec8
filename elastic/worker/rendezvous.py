"""The process group of one generation, formed and never repaired; and telling a peer's failure from the user's.

Rank 0 serves the store on the listening socket that its host keeps, so there is no port to agree on and nothing
that outlives the generation.
"""

from __future__ import annotations

import datetime
import fcntl
import os
import socket
import struct

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from elastic.plan import Assignment

_SIOCGIFADDR = 0x8915

# What Gloo, NCCL, the TCP store and FSDP's hooks say, as plain RuntimeErrors, when another rank or the network is
# to blame. Seen on torch 2.13; tests/worker/test_rendezvous.py provokes the real ones.
PEER_MESSAGES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Timed out waiting",
    "Timeout waiting for key",
    "Gloo connectFullMesh failed",
    "Application timeout caused pair closure",
    "gloo/transport/tcp",
    "NCCL error",
    "NCCL communicator was aborted",
    "Watchdog caught collective operation timeout",
    "failed to connect to",
    "Socket Timeout",
)


def join(assignment: Assignment, *, store_fd: int, device: torch.device, start_s: float, collective_s: float) -> None:
    """Form the default process group of this generation: Gloo, or NCCL on a GPU.

    store_fd: the host's listening socket, used by rank 0. start_s: limit for the peers to come; collective_s: for
    each collective afterwards. Raises what `is_peer_failure` recognises when a peer does not come.
    """
    rank = assignment.rank
    address = assignment.members[rank].store.address
    # torch offers no argument for it: without, Gloo listens on what the machine's name resolves to.
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = _interface_of(address)
    master = assignment.members[0].store
    store = TCPStore(
        master.address,
        master.port,
        is_master=rank == 0,
        wait_for_workers=False,
        master_listen_fd=os.dup(store_fd) if rank == 0 else None,
        timeout=datetime.timedelta(seconds=start_s),
    )
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore(f"{assignment.attempt}/{assignment.generation}", store),
        rank=rank,
        world_size=assignment.world,
        timeout=datetime.timedelta(seconds=collective_s),
    )


def is_peer_failure(error: BaseException) -> bool:
    """Whether `error` says that a collective or the rendezvous broke, not the task's code."""
    if isinstance(error, dist.DistError):
        return True
    return type(error) is RuntimeError and any(message in str(error) for message in PEER_MESSAGES)


def _interface_of(address: str) -> str:
    """Name of the network interface that has the IPv4 `address`. OSError: none has it."""
    wanted = socket.inet_aton(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # an interface without an IPv4 address
            if reply[20:24] == wanted:
                return name
    raise OSError(f"no interface has the address {address}; a host's address must be one of its own machine")
