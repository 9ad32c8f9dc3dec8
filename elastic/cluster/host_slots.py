"""The host slots of one worker group: each with its own placement group and actor, from asking to removal.

One placement group per slot, because the lost bundles of a shared one move onto new nodes and block them.
Nothing here waits longer than the caller's `wait_s`; each stage has a deadline, after which the slot is
freed and asked for again, later each time while its hosts keep dying young.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import ray
from ray.exceptions import ActorUnavailableError, RayActorError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLimits:
    """poll_s: how often Ray Train's controller looks at its hosts. below_min_s: how long the group may have
    fewer hosts than its minimum before it fails as a whole.

    A slot waits for capacity without limit. up_s: once it is placed, how long its actor may take to answer, at
    most twice as long (a placement on a node that just died hangs). start_s: from there to the host function
    running. silent_s: without an answer of a running host. young_s: a host that lived shorter counts against its
    slot, which then waits 1, 2, 4 ... seconds and never longer than backoff_s_max.
    """

    poll_s: float = 0.5
    below_min_s: float = 600.0
    up_s: float = 30.0
    start_s: float = 60.0
    silent_s: float = 30.0
    young_s: float = 60.0
    backoff_s_max: float = 30.0


class Hosting(Protocol):
    """What is done to an actor, stage by stage; each call returns references to wait for, at once."""

    def spawn(self, placement: PlacementGroup) -> Any: ...
    def greet(self, actor: Any) -> list[Any]: ...
    def start(self, actor: Any, greeting: Any) -> tuple[Any, list[Any]]: ...
    def poll(self, actor: Any) -> list[Any]: ...


@dataclass(slots=True, kw_only=True)
class Slot:
    """`waits`: references whose answers take the slot on. `worker`: what `Hosting.start` made, once known.
    `answer`: the newest poll's; `error`: why a poll of a live host could not be read."""

    index: int
    stage: Literal["free", "asked", "starting", "joined"] = "free"
    placed: bool = False
    placement: PlacementGroup | None = None
    actor: Any = None
    waits: list[Any] = field(default_factory=list)
    deadline_s: float = 0.0
    worker: Any = None
    answer: Any = None
    error: Exception | None = None
    finished: bool = False
    joined_s: float = 0.0
    lost_young: int = 0
    ask_after_s: float = 0.0


class HostSlots:
    """All slots of a group; also the `placement_group_handle` that Ray Train shuts down with its group."""

    def __init__(
        self,
        hosting: Hosting,
        *,
        count: int,
        name: str,
        resources: dict[str, float],
        selectors: list[dict[str, str]] | None,
        limits: HostLimits,
    ) -> None:
        self._hosting = hosting
        self._name = name
        self._resources = resources
        self._selectors = selectors
        self._limits = limits
        self._slots = [Slot(index=index) for index in range(count)]
        self._asked = 0
        self.last_loss = ""

    @property
    def joined(self) -> list[Slot]:
        return [slot for slot in self._slots if slot.stage == "joined"]

    @property
    def workers(self) -> list[Any]:
        """What `Hosting.start` made, of the hosts that joined or are about to."""
        return [slot.worker for slot in self._slots if slot.worker is not None]

    @property
    def finishing(self) -> bool:
        """Whether some host function has returned or raised: the group is at its end."""
        return any(slot.finished for slot in self._slots)

    @property
    def starting(self) -> bool:
        """Whether some actor is up and will join within moments."""
        return any(slot.stage == "starting" for slot in self._slots)

    def turn(self, now_s: float, *, wait_s: float) -> bool:
        """Take every slot as far as it gets, waiting at most `wait_s`. True: the set of joined hosts changed.

        While the group is finishing no slot is asked for, and pending ones are freed.
        """
        before = [slot.actor for slot in self.joined]
        if self.finishing:
            for slot in self._slots:
                if slot.stage in ("asked", "starting"):
                    self._free(slot)
        else:
            for slot in self._slots:
                if slot.stage == "free" and slot.ask_after_s <= now_s:
                    self._ask(slot, now_s)
        for slot in self.joined:
            if not slot.waits and not slot.finished:
                slot.waits = self._hosting.poll(slot.actor)
        done = self._answered(wait_s)
        for slot in self._slots:
            if slot.waits:
                self._advance(slot, done, now_s)
        return before != [slot.actor for slot in self.joined]

    def shutdown(self) -> None:
        """Kill every actor and remove every placement group, pending ones included."""
        for slot in self._slots:
            if slot.stage != "free":
                self._free(slot)

    def _answered(self, wait_s: float) -> set[Any]:
        """The references that have an answer. Only running hosts are waited for together: a slot without
        capacity must not hold up the turn."""
        waits = [ref for slot in self._slots for ref in slot.waits]
        if not waits:
            return set()
        polls = [ref for slot in self.joined for ref in slot.waits]
        ray.wait(polls or waits, num_returns=len(polls) or 1, timeout=wait_s)
        return set(ray.wait(waits, num_returns=len(waits), timeout=0)[0])

    def _ask(self, slot: Slot, now_s: float) -> None:
        self._asked += 1
        slot.placement = placement_group(
            [self._resources],
            name=f"{self._name}-{slot.index}-{self._asked}",
            bundle_label_selector=[self._selectors[slot.index]] if self._selectors else None,
        )
        slot.stage = "asked"
        # The actor's creation waits for the placement group by itself, which saves the task that
        # `PlacementGroup.ready` would run first.
        slot.actor = self._hosting.spawn(slot.placement)
        slot.waits = self._hosting.greet(slot.actor)
        slot.deadline_s = now_s + self._limits.up_s

    def _advance(self, slot: Slot, done: set[Any], now_s: float) -> None:
        if not all(ref in done for ref in slot.waits):
            if now_s > slot.deadline_s:
                self._overdue(slot, now_s)
            return
        try:
            answers = ray.get(slot.waits, timeout=1.0)
        except ActorUnavailableError as error:
            # Ray may reach it again (a death is an ActorDiedError), but not for ever.
            slot.waits = []
            if slot.stage != "joined" or now_s > slot.deadline_s:
                self._lose(slot, now_s, str(error))
        except RayActorError as error:
            self._lose(slot, now_s, str(error))
        except Exception as error:
            slot.waits = []
            if slot.stage == "joined":
                slot.error, slot.finished = error, True
            else:
                self._lose(slot, now_s, str(error))
        else:
            self._answer(slot, answers, now_s)

    def _answer(self, slot: Slot, answers: list[Any], now_s: float) -> None:
        slot.waits = []
        if slot.stage == "asked":
            slot.worker, slot.waits = self._hosting.start(slot.actor, answers[0])
            slot.stage, slot.deadline_s = "starting", now_s + self._limits.start_s
            return
        slot.deadline_s = now_s + self._limits.silent_s
        if slot.stage == "starting":
            slot.stage, slot.joined_s = "joined", now_s
            slot.worker.log_file_path = answers[-1]
            logger.info("host slot %d joined: %s", slot.index, slot.worker)
        else:
            slot.answer, slot.finished = answers[0], not answers[0].running

    def _overdue(self, slot: Slot, now_s: float) -> None:
        """Its deadline passed: lost, unless it still waits for capacity or was placed since the last look."""
        if slot.stage == "asked" and not slot.placed:
            slot.placed = placement_group_table(slot.placement)["state"] == "CREATED"
            slot.deadline_s = now_s + self._limits.up_s
        else:
            self._lose(slot, now_s, "no answer before the deadline")

    def _lose(self, slot: Slot, now_s: float, reason: str) -> None:
        """Free the slot of a dead or silent host; when to ask again depends on how young its hosts die."""
        lived = slot.stage == "joined" and now_s - slot.joined_s >= self._limits.young_s
        backoff_s = 0.0 if lived or not slot.lost_young else 2.0 ** (slot.lost_young - 1)
        slot.lost_young = 0 if lived else min(slot.lost_young + 1, 16)
        slot.ask_after_s = now_s + min(backoff_s, self._limits.backoff_s_max)
        self.last_loss = f"slot {slot.index} ({slot.stage}): {reason.strip()}"
        logger.warning("host lost, %s", self.last_loss)
        self._free(slot)

    def _free(self, slot: Slot) -> None:
        if slot.actor is not None:
            ray.kill(slot.actor)
        if slot.placement is not None:
            remove_placement_group(slot.placement)
        slot.stage, slot.placement, slot.actor, slot.worker = "free", None, None, None
        slot.waits, slot.answer, slot.error = [], None, None
        slot.finished = slot.placed = False
