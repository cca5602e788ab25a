"""Weights split over ranks (FSDP2), and whole again where something needs them whole.

Every block is a unit that is gathered before its forward and backward pass and split again behind
them; the rest (embeddings, norm, head) is the root's, gathered while the loss is computed inside
the root's forward. Weights of the loss are final before they reach a rank, so gradients are summed
over ranks, never averaged.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fastturn import lora
from fastturn.config import ConfigError
from fastturn.dist import World
from fastturn.models import blocks
from fastturn.policy import Policy, is_plain_embedding
from fastturn.vocabulary import SplitVocabulary


def shard(
    policy: Policy,
    world: World,
    *,
    mixed: bool = False,
    cpu_offload: bool = False,
    split_head: bool = False,
) -> Policy:
    """Split the weights over the ranks of `world.mesh` in place; without a mesh they stay whole.

    `mixed`: what is gathered is bfloat16; shards, reduced gradients and moments stay float32.
    `cpu_offload`: shards, gradients and moments stay in host memory between uses. `split_head`: the
    head is never gathered (`vocabulary.py`); not with `cpu_offload`.
    All ranks must hold the same weights, best in host memory: blocks move to the device one by one.
    Returns `policy`. Raises `ConfigError` for options that need a mesh where there is none, and for
    a split head that is tied to an embedding of another kind.
    """
    if world.mesh is None:
        if mixed or cpu_offload:
            raise ConfigError(
                f"{'model.dtype=mixed' if mixed else 'dist.cpu_offload=true'}: expected a world "
                f"with a mesh; open it with dist.open_world(mesh=True), as fastturn train does"
            )
        return policy
    # Inputs are not cast: the blocks get what the embedding gave, and log-probabilities of the
    # reference policy must not be rounded.
    precision = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if mixed else None,
        reduce_dtype=torch.float32 if mixed else None,
        cast_forward_inputs=False,
    )
    pinned = world.device.type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=pinned) if cpu_offload else OffloadPolicy()
    apart = {_split(policy, world.mesh, mixed)} if split_head else None
    for unit in (*blocks(policy.model), policy):
        fully_shard(
            unit,
            mesh=world.mesh,
            mp_policy=precision,
            offload_policy=offload,
            ignored_params=apart,
        )
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    register_fsdp_forward_method(policy, "score")
    return policy


def _split(policy: Policy, mesh: DeviceMesh, mixed: bool) -> nn.Parameter:
    """Give the head's weight, wherever the model holds it, to its ranks by rows; returns it."""
    weight, embedding = policy.head().weight_VD, policy.model.get_input_embeddings()
    if embedding.weight is weight and not is_plain_embedding(embedding, weight):
        raise ConfigError(
            f"dist.split_head=true: the head is tied to a {type(embedding).__name__}, which does "
            f"more than look up rows; set dist.split_head=false"
        )
    placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    rows = distribute_tensor(weight.detach(), mesh, placements, src_data_rank=None)
    split = nn.Parameter(rows, weight.requires_grad)
    for module in (embedding, policy.model.get_output_embeddings()):
        if module.weight is weight:
            module.weight = split
    dtype = torch.bfloat16 if mixed else weight.dtype
    policy.vocabulary = SplitVocabulary.over(mesh, len(weight), dtype)
    return split


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with all its elements; gathered (by all ranks together) when it is split."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def kept(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a model is saved as: parameters, tied ones once, and buffers that its state names."""
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    buffers = dict(model.named_buffers())
    return tensors | {name: buffers[name] for name in model.state_dict() if name in buffers}


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    """Those of `kept` that training changes: all but frozen parameters."""
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return {name: tensor for name, tensor in kept(model).items() if name not in frozen}


@torch.no_grad()
def gathered(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor), one at a time. All ranks together: each must take every item."""
    for name, tensor in tensors.items():
        yield name, whole(tensor)


def whole_state(model: nn.Module, keep: bool) -> dict[str, torch.Tensor]:
    """Everything in host memory on ranks that `keep`; {} on the others, which take part."""
    return on_host(gathered(kept(model)), keep)


@torch.no_grad()
def merged_state(model: nn.Module, keep: bool) -> dict[str, torch.Tensor]:
    """As `whole_state`, with adapters added to the weights that they adapt."""
    return on_host(((w.name, w.whole()) for w in lora.merged(model, kept(model))), keep)


def on_host(tensors: Iterable[tuple[str, torch.Tensor]], keep: bool) -> dict[str, torch.Tensor]:
    """Tensors that are gathered one by one, in host memory on ranks that `keep`."""
    state = {}
    for name, tensor in tensors:
        if keep:
            state[name] = tensor.cpu()
    return state


class Mirror:
    """The policy to sample from in this process: itself when its weights are whole, else a whole
    copy that `refresh` brings up to date. (Decoding from split weights would gather all of them
    again for every token.) None on a rank that does not `keep` one. `apart`: a copy in any case,
    because the sampler may fall behind what is trained."""

    def __init__(
        self,
        policy: Policy,
        world: World,
        *,
        keep: bool = True,
        mixed: bool = False,
        apart: bool = False,
    ) -> None:
        """Before `shard`. All ranks hold the same weights, so the copy is up to date. `mixed`: the
        copy is bfloat16, as what the split weights are gathered to."""
        self.source = policy
        self.policy: Policy | None = policy
        if apart or world.mesh is not None:
            self.policy = _copied(policy, mixed).to(world.device) if keep else None
        self._version: int | None = None

    @torch.no_grad()
    def refresh(self, version: int | None = None) -> None:
        """The weights of `version` from now on; nothing is sent when they are here already. None:
        whatever the source holds."""
        if self.policy is self.source or (version is not None and version == self._version):
            return
        own = kept(self.policy.model) if self.policy else {}
        for name, tensor in gathered(trained(self.source.model)):
            if name in own:
                own[name].copy_(tensor)
        self._version = version


def _copied(policy: Policy, mixed: bool) -> Policy:
    model = copy.deepcopy(policy.model).requires_grad_(False)
    return Policy(model.to(torch.bfloat16) if mixed else model, policy.backend.attention)
