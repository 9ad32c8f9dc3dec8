"""A peer's failure is told from the task's own: by errors that real processes meet when a real one dies."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection

import pytest
import torch

from elastic.plan import Assignment, Endpoint, Member, Plan
from elastic.worker.rendezvous import _interface_of, is_peer_failure, join

LIMIT_S = 60.0


def assignment(rank: int, world: int, port: int) -> Assignment:
    store = Endpoint(address="127.0.0.1", port=port)
    return Assignment(
        run="r",
        attempt=1,
        generation=1,
        rank=rank,
        plan=Plan(world=world, shares=(1,) * world, micro_batches=1),
        members=tuple(Member(host=f"h{r}", node="n", domain="n", mover=store, store=store) for r in range(world)),
        restore=None,
        until_step=1,
        partner=None,
    )


def _caught(work: Callable[[], object]) -> tuple[bool, str]:
    try:
        work()
    except Exception as error:  # the test wants to know of any
        return is_peer_failure(error), f"{type(error).__name__}: {error}"
    return False, "nothing was raised"


def _rank(rank: int, world: int, listener: socket.socket, port: int, what: str, told: Connection) -> None:
    torch.set_num_threads(1)
    store_fd = listener.fileno()
    here = assignment(rank, world, port)

    def group() -> None:
        join(here, store_fd=store_fd, device=torch.device("cpu"), start_s=5.0, collective_s=5.0)

    if what == "absent":
        told.send(_caught(group))
        os._exit(0)
    group()
    x = torch.ones(4, 4, requires_grad=True)
    torch.distributed.all_reduce(x.detach())
    if rank == 1 and what == "dies":
        os._exit(9)
    if rank == 1:
        told.recv()  # hangs until the others have timed out
    told.send(_caught(lambda: _backward(x) if what == "dies" else torch.distributed.all_reduce(x.detach())))
    os._exit(0)


class _Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # torch's is untyped
        for _ in range(100):
            torch.distributed.all_reduce(gradient)
        return gradient


def _backward(x: torch.Tensor) -> None:
    _Reduced.apply(x).sum().backward()


def _tell(world: int, what: str, started: int) -> tuple[bool, str]:
    """What rank 0 told; `started` of the `world` ranks exist."""
    context = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        pipes = [context.Pipe() for _ in range(started)]
        processes = [
            context.Process(target=_rank, args=(rank, world, listener, port, what, pipes[rank][1]))
            for rank in range(started)
        ]
        for process in processes:
            process.start()
    try:
        assert pipes[0][0].poll(LIMIT_S), "rank 0 told nothing"
        told: tuple[bool, str] = pipes[0][0].recv()
    finally:
        for process in processes:
            process.kill()
            process.join(LIMIT_S)
    return told


@pytest.mark.parametrize(("what", "started"), [("dies", 2), ("hangs", 2), ("absent", 1)])
def test_what_a_lost_peer_raises_is_recognised(what: str, started: int) -> None:
    recognised, error = _tell(2, what, started)
    assert recognised, error


def test_a_store_that_is_not_there_is_a_peers_failure() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(Exception) as caught:
        join(assignment(1, 2, port), store_fd=-1, device=torch.device("cpu"), start_s=1.0, collective_s=1.0)
    assert is_peer_failure(caught.value), repr(caught.value)


@pytest.mark.parametrize(
    "work",
    [
        lambda: torch.ones(2, 3) @ torch.ones(2, 3),
        lambda: torch.ones(3).view(2),
        lambda: torch.zeros(1).backward(),
        lambda: {}["no such key"],
        lambda: torch.nn.Linear(2, 2)(torch.ones(1, 3)),
    ],
)
def test_the_tasks_own_errors_are_not(work: Callable[[], object]) -> None:
    with pytest.raises(Exception) as caught:
        work()
    assert not is_peer_failure(caught.value)


def test_the_interface_of_an_address() -> None:
    assert _interface_of("127.0.0.1") == "lo"
    with pytest.raises(OSError, match="no interface has the address"):
        _interface_of("192.0.2.1")
