"""Sharding of a network's parameters, gradients, moments and averages over the processes (FSDP).

Each process stores only its rows of every parameter in the vectors: weights, gradient, moments and averages take 1 /
world size of their memory. The network gathers the rows of one block after the other, in the forward pass and again in
the backward pass, which adds up the gradients and leaves each process the gradients of its rows (PyTorch's
`fully_shard`).
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from image_diffusion.nn.blocks import blocks, factors, inner_matrices
from image_diffusion.training.parallel.flat_parameters import Flat, Layout, Slot, trainable
from image_diffusion.training.parallel.world import World


class Shares(Layout):
    """Layout of the rows of one process. A tensor of n rows has ceil(n / world size) rows in every process, the last
    ones padded with zeros, so that the layout is the same in all processes.

    shares: this process's rows of the tensors, by name. rows: numbers of rows of the complete tensors, by name.
    """

    def __init__(self, shares: Mapping[str, Tensor], rows: Mapping[str, int], world: World) -> None:
        super().__init__(shares)
        self._rows, self._world = rows, world

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """Return complete tensors by name, gathered one by one, in the first process, on the CPU; elsewhere none."""
        whole = {}
        for slot in self.slots:
            rows = self.gathered(vector, slot)
            if self._world.is_main:
                whole[slot.name] = rows.cpu()
        return whole

    def checkpoint_tensors(self, vector: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return a checkpoint's tensors of a vector: no complete tensors, and this process's rows, by name."""
        return {}, {slot.name: self.own(vector, slot) for slot in self.slots}

    def fill(self, vector: Tensor, tensors: Mapping[str, Tensor] | None, world: World) -> None:
        """Distribute tensors of the first process: every process receives its rows. tensors: by name."""
        for slot in self.slots:
            whole = torch.empty(self._rows[slot.name], *slot.shape[1:], device=vector.device)
            if tensors is not None:
                whole.copy_(tensors[slot.name])
            world.broadcast(whole)
            self.keep(vector, slot, whole)

    def gathered(self, vector: Tensor, slot: Slot) -> Tensor:
        """Return one complete tensor of a vector of this layout in every process. All processes call it together."""
        return self._world.gather(slot.within(vector)).flatten(0, 1)[: self._rows[slot.name]]

    def keep(self, vector: Tensor, slot: Slot, whole: Tensor) -> None:
        """Copy this process's rows of a complete tensor into the vector."""
        own = self.own(vector, slot)
        own.copy_(whole[self._world.rank * slot.shape[0] :][: len(own)])

    def own(self, vector: Tensor, slot: Slot) -> Tensor:
        """Return this process's rows of a tensor, without the padding."""
        return slot.within(vector)[: max(0, self._rows[slot.name] - self._world.rank * slot.shape[0])]


class ShardedFlat(Shares, Flat):
    """One process's rows of a network's parameters. by_machine: rows are sharded within each machine, and gradients are
    summed over the machines (HSDP); otherwise rows are sharded over all processes.

    computes_in: dtype to which autocast rounds the factors of products. The weights of linear and convolutional layers
    are gathered in this dtype; all others are gathered in float32, in which all weights are stored. (PyTorch before
    2.15 supports only one dtype per block: it gathers all weights in float32.)

    Each block, a member of the network's outermost lists of modules, is gathered and freed as a unit. All other
    parameters are a further unit, which stays gathered until the end of the backward pass. Parameters
    without gradient are complete in every process.
    """

    sums_gradients = True
    is_whole = False

    def __init__(
        self,
        network: nn.Module,
        world: World,
        computes_in: torch.dtype = torch.float32,
        reduce: torch.dtype = torch.float32,
        by_machine: bool = False,
    ) -> None:
        mesh, world = _sharing(world, by_machine)
        self._world, self.inner, self.writers = world, inner_matrices(network), world.size
        shapes = {name: parameter.shape for name, parameter in trainable(network).items()}
        frozen = {parameter for parameter in network.parameters() if not parameter.requires_grad}
        products = factors(network) & shapes.keys() if computes_in != torch.float32 else set()
        policy = _policy([network.get_parameter(name) for name in products], computes_in, reduce)
        self._blocks = [
            fully_shard(block, mesh=mesh, reshard_after_forward=True, mp_policy=policy, ignored_params=frozen)
            for block in blocks(network)
        ]
        root = fully_shard(network, mesh=mesh, reshard_after_forward=False, mp_policy=policy, ignored_params=frozen)
        self._groups: list[FSDPModule] = [*self._blocks, root]
        for group in self._groups:
            # Sums, not FSDP's means: each loss is already divided by the global batch.
            group.set_gradient_divide_factor(1.0)
            group.set_force_sum_reduction_for_comms(True)
        self._network, self._root, self._products = network, root, products
        self._sums_each = reduce != torch.float32
        self.parameters = trainable(network)
        self._rows = {name: shape[0] for name, shape in shapes.items()}
        # Meta tensors: only the shapes are needed, and the whole parameters may not fit into memory again.
        shares = {name: torch.empty(-(-n // world.size), *rest, device="meta") for name, (n, *rest) in shapes.items()}
        self._lay_out(shares, world.device)
        for value, own in zip(self._all_own(self.values), self._shards(), strict=True):
            value.copy_(own)
        for parameter, gradient in zip(self.parameters.values(), self._all_own(self.gradient), strict=True):
            sharded = cast("DTensor", parameter)
            parameter.grad = DTensor.from_local(
                gradient, mesh, sharded.placements, run_check=False, shape=sharded.shape, stride=sharded.stride()
            )

    def subset(self, names: Container[str]) -> Layout:
        shares = {slot.name: torch.empty(slot.shape, device="meta") for slot in self.slots if slot.name in names}
        return Shares(shares, self._rows, self._world)

    def before_pass(self, last: bool) -> None:
        """Prepare for each backward pass. The last pass of a step adds up the gradients over all processes; until then
        each process has its own complete gradient in float32. (PyTorch stores unsummed gradients in the dtype of
        communication: if that has fewer bits, every pass sums.)
        """
        self._root.set_requires_gradient_sync(last or self._sums_each)
        self._root.set_is_last_backward(last)

    def norm(self) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(self._world.gather(super().norm()))
        return norm

    def update_network(self) -> None:
        self._give(self.values)

    @contextmanager
    def with_weights(self, vector: Tensor) -> Iterator[None]:
        """Give the network the weights of a vector of this layout in this context, complete in every process and in
        float32 whatever the precision. After a forward pass that was interrupted by a request to stop, no other forward
        pass may follow."""
        self._give(vector)
        self._keep_whole(True)
        try:
            for group in self._groups:
                group.unshard()
            self._gather_exact(vector)
            yield
        finally:
            for group in self._groups:
                group.reshard()
            self._keep_whole(False)
            self._give(self.values)

    def _keep_whole(self, whole: bool) -> None:
        for block in self._blocks:
            block.set_reshard_after_forward(not whole, recurse=False)

    def _gather_exact(self, vector: Tensor) -> None:
        """Replace the weights that were gathered in fewer bits by exact ones, until the weights are freed."""
        exact = {
            self._network.get_parameter(slot.name): nn.Parameter(self.gathered(vector, slot), requires_grad=False)
            for slot in self.slots
            if slot.name in self._products
        }
        for module in self._network.modules() if exact else ():
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                if parameter in exact:
                    module.register_parameter(name, exact[parameter])

    def _give(self, vector: Tensor) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self._shards(), self._all_own(vector))

    def _shards(self) -> list[Tensor]:
        """Return this process's rows of each parameter, as the network stores them."""
        return [cast("DTensor", parameter).to_local().detach() for parameter in self.parameters.values()]

    def _all_own(self, vector: Tensor) -> list[Tensor]:
        return [self.own(vector, slot) for slot in self.slots]


def _policy(products: Collection[nn.Parameter], computes_in: torch.dtype, reduce: torch.dtype) -> MixedPrecisionPolicy:
    """Return the policy of dtypes in which parameters are gathered and gradients summed. products: the parameters
    gathered in the dtype `computes_in`."""
    policy = MixedPrecisionPolicy(reduce_dtype=reduce, cast_forward_inputs=False)
    if not products or not hasattr(policy, "param_dtype_override_fn"):
        return policy
    rounded = set(products)
    return replace(
        policy,
        param_dtype=computes_in,
        param_dtype_override_fn=lambda parameter: computes_in if parameter in rounded else parameter.dtype,
    )


def _sharing(world: World, by_machine: bool) -> tuple[DeviceMesh, World]:
    """Return the mesh of all processes, and the world of those over which the rows are sharded."""
    per_machine = world.per_machine or world.size
    if not by_machine or per_machine == world.size:
        return init_device_mesh(world.device.type, (world.size,)), world
    if world.size % per_machine:
        raise ValueError(
            f"train.sharding is machine, but {world.size} processes are not {per_machine} on every machine. Start as "
            f"many on each, or set it to full."
        )
    names = ("machines", "processes")
    mesh = init_device_mesh(world.device.type, (world.size // per_machine, per_machine), mesh_dim_names=names)
    group = mesh["processes"].get_group()
    return mesh, replace(world, rank=world.rank % per_machine, size=per_machine, group=group)
