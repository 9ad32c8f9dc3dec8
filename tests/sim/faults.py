"""What goes wrong in a simulated cluster, by name; `World` draws one of the seed's kinds now and then."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from elastic import events
from elastic.controller.driver import replay
from elastic.events import Exit

if TYPE_CHECKING:
    from tests.sim.hosts import SimHost
    from tests.sim.world import World


def _kill_trainer(world: World) -> None:
    running = [h for h in world.up() if h.trainer and not h.trainer.exit]
    if running:
        _end_trainer(world, world.rng.choice(running))


def _end_trainer(world: World, host: SimHost) -> None:
    host.stop_trainer(Exit(kind="lost", step=host.trainer.step, signal=9))  # type: ignore[union-attr]
    world.peers_notice(host)


def _kill_host(world: World) -> None:
    if up := world.up():
        host = world.rng.choice(up)
        world.kill_host(host)
        world.after(world.draw(2.0, 8.0), world.add_host, host.node, host.slot)


def _kill_node(world: World) -> None:
    if hosts := _drawn_node(world):
        for host in hosts:
            world.kill_host(host)
        world.after(world.draw(2.0, 30.0), world.add_node)


def _drawn_node(world: World) -> list[SimHost]:
    up = world.up()
    node = world.rng.choice(up).node if up else ""
    return [host for host in up if host.node == node]


def _freeze(world: World, hosts: list[SimHost]) -> None:
    for host in hosts:
        host.frozen = True
        world.after(world.draw(0.5, 20.0), thaw, world, host)


def thaw(world: World, host: SimHost) -> None:
    host.frozen = False
    if host.alive:
        host.check_lease()
        host.report()


def _freeze_host(world: World) -> None:
    if up := world.up():
        _freeze(world, [world.rng.choice(up)])


def _freeze_node(world: World) -> None:
    _freeze(world, _drawn_node(world))


def _add_node(world: World) -> None:
    if len(world.up()) < world.config.hosts_max + 3:
        world.add_node()


def _restart_coordinator(world: World) -> None:
    """Killed at any moment, back in a moment: its state is the journal's fold."""
    world.cluster.lost_with_coordinator()
    state = replay(world.entries(), world.config)
    assert state == world.driver.state, "replay differs from the live state"
    world.driver = world.coordinate(state)
    world.driver.take(events.CoordinatorRestarted())
    world.restarts += 1


def _kill_template(world: World) -> None:
    if up := world.up():
        host = world.rng.choice(up)
        host.up = False
        if host.trainer and not host.trainer.exit:
            _end_trainer(world, host)
        world.after(world.draw(1.0, 6.0), world.warm, host)


def _quarantine(world: World) -> None:
    nodes = sorted({host.node for host in world.up()})
    if nodes:
        node = world.rng.choice(nodes)
        world.driver.take(events.NodeQuarantined(node=node, why="drawn"))
        world.after(world.draw(5.0, 30.0), lambda: world.driver.take(events.NodeReleased(node=node, why="drawn")))


def _pause(world: World) -> None:
    world.driver.take(events.PauseRequested(who="sim", why="drawn"))
    world.after(world.draw(1.0, 20.0), lambda: world.driver.take(events.ResumeRequested(who="sim", why="drawn")))


def _resize(world: World) -> None:
    low, high = world.config.hosts_min, world.config.hosts_max
    hosts = world.rng.choice((None, world.rng.randint(low, high)))
    nodes = world.rng.choice((None, world.rng.randint(1, 4)))
    world.driver.take(events.ResizeRequested(nodes=nodes, hosts=hosts, who="sim", why="drawn"))


def _checkpoint(world: World) -> None:
    world.driver.take(events.CheckpointRequested(who="sim", why="drawn"))


def _set(world: World) -> None:
    key, values = world.rng.choice(
        (("checkpoint.interval_steps", (1, 7, 50)), ("policies.resize", ("off", "observe", "act")))
    )
    value = world.rng.choice(values)
    world.driver.take(events.SettingChanged(key=key, value=value, who="sim", why="drawn"))


def _flap(world: World) -> None:
    """A node that dies and comes back, again and again."""
    if hosts := _drawn_node(world):
        _die_and_return(world, {(host.node, host.slot) for host in hosts}, world.rng.randint(2, 5))


def _die_and_return(world: World, slots: set[tuple[str, int]], times: int) -> None:
    for host in world.up():
        if (host.node, host.slot) in slots:
            world.kill_host(host)
    for node, slot in sorted(slots):
        world.after(world.draw(0.5, 2.0), world.add_host, node, slot)
    if times > 1 and world.faults_on:
        world.after(world.draw(5.0, 20.0), _die_and_return, world, slots, times - 1)


def _cut(world: World) -> None:
    """New hosts of a node reach nobody, and nobody's new hosts reach it."""
    if nodes := sorted({host.node for host in world.up()}):
        node = world.rng.choice(nodes)
        world.cut.add(node)
        world.after(world.draw(5.0, 30.0), world.cut.discard, node)


def _storage_outage(world: World) -> None:
    """Uploads, commits and reads from storage fail for a while."""
    world.storage_down_until_s = max(world.storage_down_until_s, world.clock.now_s() + world.draw(2.0, 90.0))


def _damage_disk(world: World) -> None:
    """What a node's disk holds now is not what was written."""
    if nodes := sorted(node for node, disk in world.disks.items() if disk):
        node = world.rng.choice(nodes)
        world.disk_contents |= dict.fromkeys(((node, name) for name in world.disks[node]), None)


def _kill_all(world: World) -> None:
    """All memory is lost at once; the nodes come back with their disks, now and then a damaged one."""
    if world.rng.random() < 0.4:
        _damage_disk(world)
    for host in world.up():
        world.kill_host(host)
        world.after(world.draw(1.0, 4.0), world.add_host, host.node, host.slot)


def _two_at_once(world: World) -> None:
    for kind in world.rng.sample(("kill_trainer", "kill_host", "kill_node", "kill_template"), 2):
        KINDS[kind](world)


KINDS: dict[str, Callable[[World], None]] = {
    "kill_trainer": _kill_trainer,
    "kill_host": _kill_host,
    "kill_node": _kill_node,
    "freeze_node": _freeze_node,
    "freeze_host": _freeze_host,
    "add_node": _add_node,
    "restart_coordinator": _restart_coordinator,
    "kill_template": _kill_template,
    "quarantine": _quarantine,
    "pause": _pause,
    "resize": _resize,
    "checkpoint": _checkpoint,
    "set": _set,
    "flap": _flap,
    "cut": _cut,
    "storage_outage": _storage_outage,
    "kill_all": _kill_all,
    "damage_disk": _damage_disk,
    "two_at_once": _two_at_once,
}
