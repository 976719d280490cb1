# SPDX-License-Identifier: Apache-2.0
"""Where trainer ranks run: a place for each on the machines of a Ray cluster, held until the run ends."""

import logging

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tasks.actors.ray_address import ClusterError
from tasks.system.signals import passed_on

log = logging.getLogger(__name__)
PARTS = 10_000
"""Of a GPU, that Ray can count."""

NODE_LABEL = "ray.io/node-id"
WAIT_WARNING_S = 30


class RankPlaces:
    """One place for each trainer rank: as many on each machine, those of consecutive ranks together.

    A place is a GPU of its own, or on the CPU a claim to the machine that takes nothing of it. A rollout worker that
    is to share a rank's GPU, or to read its memory, goes to the rank's place, text encoders that are to share a GPU
    to the first, and rewards to one after the other. Returns when the places are held.

    Args:
        machines: `trainer.nnodes`.
        ranks: on each, `trainer.n_gpus_per_node`.
        device: "cuda" or "cpu".
        actors: that a place takes: a rank alone, or others besides.

    Attributes:
        num_gpus: what an actor at a place asks for.

    Raises:
        ClusterError: too few machines are of that size.
    """

    def __init__(self, machines: int, ranks: int, device: str, actors: int = 1):
        on_gpus = device == "cuda"
        self.num_gpus = _share(actors) if on_gpus else 0.0
        self._count = machines * ranks
        # A group's parts must ask for something, and CPUs may all be reserved: a byte of memory is there always.
        kind = "GPU" if on_gpus else "memory"
        fitting = f"in({','.join(_machines_with(machines, ranks, on_gpus))})"
        if machines == 1:
            self._group = _held([{kind: 1}] * ranks, "STRICT_PACK", [fitting] * ranks)
            return
        # Parts of one GPU each, so that Ray gives every place one; but its spreading knows whole parts alone. So a
        # group of one part a machine finds out where there is room.
        finder = _held([{kind: ranks}] * machines, "STRICT_SPREAD", [fitting] * machines)
        chosen = placement_group_table(finder)["bundles_to_node_id"]
        remove_placement_group(finder)
        nodes = [chosen[number // ranks] for number in range(self._count)]
        self._group = _held([{kind: 1}] * self._count, "PACK", nodes)

    def place(self, number: int) -> PlacementGroupSchedulingStrategy:
        """For an actor that is rank `number`, or goes with it; behind the last rank the first comes again."""
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number % self._count)


def _share(actors: int) -> float:
    """What Ray counts of a GPU for each of so many actors on it; it limits nothing."""
    return PARTS // actors / PARTS


def _machines_with(machines: int, ranks: int, gpus: bool) -> list[str]:
    """Ids of the machines that have so many GPUs in all, used or not; or any CPU, which a head may be without."""
    kind, needed = ("GPU", ranks) if gpus else ("CPU", 0.0)
    sizes = {node["NodeID"]: node["Resources"].get(kind, 0.0) for node in ray.nodes() if node["Alive"]}
    fitting = [node for node, size in sizes.items() if size >= needed and size > 0]
    if len(fitting) < machines:
        size = f" with {ranks} GPUs each" if gpus else ""
        there = ", ".join(f"{size:g}" for size in sorted(sizes.values(), reverse=True))
        raise ClusterError(
            f"trainer.nnodes {machines} x trainer.n_gpus_per_node {ranks} asks for {machines} machines{size}, but the "
            f"Ray cluster has {len(fitting)} that will do ({kind}s of its machines: {there}): lower one of the two, or "
            "add machines"
        )
    return fitting


def _held(bundles: list[dict[str, float]], strategy: str, nodes: list[str]) -> PlacementGroup:
    """A placement group once it has its resources, which other runs may still hold."""
    selectors = [{NODE_LABEL: node} for node in nodes]
    group = placement_group(bundles, strategy=strategy, bundle_label_selector=selectors)
    waited = 0
    while not _is_held(group):
        if waited == WAIT_WARNING_S:
            log.warning("waiting for GPUs of the Ray cluster that others hold")
        waited += 1
    return group


def _is_held(group: PlacementGroup) -> bool:
    """Within a second, so that the run can be ended meanwhile."""
    with passed_on():
        return bool(group.wait(1))
