"""What are the dimensions of a user's mesh for? Meshes are checked before any group is made."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from shardwise.errors import ConfigError, RanksDifferError

ROLES = ("shard", "replicate", "tensor", "pipe")
"""What a dimension can be for: its ranks divide every Unit; hold the same shards; hold other parts of the model's tensors (tensor
parallelism); hold other blocks of the model (pipeline parallelism)."""
_EXAMPLE = 'init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))'


def dimensions(mesh: DeviceMesh, roles: Mapping[str, str] | None) -> dict[str, str] | None:
    """The name of the dimension for each role. None: there is one dimension, and it shards."""
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(f"mesh={mesh!r} is a {type(mesh).__name__}; a torch DeviceMesh is needed: {_EXAMPLE}.")
    names = mesh.mesh_dim_names
    if roles is None and mesh.ndim == 1 and (names is None or names[0] not in ROLES[1:]):
        _check_ranks(mesh)
        return None  # whatever its name: mesh['dp']
    if names is None:
        _refuse(mesh, f"its {mesh.ndim} dimensions have no names. Name them: {_EXAMPLE}")
    unknown = [name for name in roles or () if name not in names]
    if unknown:
        _refuse(mesh, f"mesh_roles= names {unknown[0]!r}, which is not a dimension of it")
    found: dict[str, str] = {}
    for name in names:
        role = name if roles is None else roles.get(name, name)
        if role not in ROLES:
            what = f"dimension {name!r}" if role == name else f"role {role!r} of dimension {name!r}"
            _refuse(
                mesh, f"{what} is not known. Roles are {', '.join(map(repr, ROLES))}; say them by the names or by mesh_roles="
            )
        if role in found:
            _refuse(mesh, f"dimensions {found[role]!r} and {name!r} both have the role {role!r}. Flatten them into one")
        found[role] = name
    if "shard" not in found:
        _refuse(mesh, f"no dimension has the role 'shard'. Give it one, of size 1 if nothing is to be sharded: {_EXAMPLE}")
    _check_ranks(mesh)
    return found if len(found) > 1 else None


def has_pipe(mesh: DeviceMesh | None, roles: Mapping[str, str] | None) -> bool:
    """Whether a mesh has a dimension of pipeline parallelism, whose ranks have different models."""
    names = (mesh.mesh_dim_names or ()) if isinstance(mesh, DeviceMesh) else ()
    return "pipe" in ((roles or {}).get(name, name) for name in names)


def check_alike(mesh: DeviceMesh, named: Mapping[str, str] | None, timeout_s: float = 600.0) -> None:
    """Raise if a rank of the mesh passes another one, or none within `timeout_s`: groups of different meshes would hang.

    `named`: the dimension for each role, as `dimensions` found them.
    """
    ranks, rank = mesh.mesh.flatten().tolist(), dist.get_rank()
    mine = f"{mesh.mesh.tolist()} named {mesh.mesh_dim_names}" + (f" for {dict(named)}" if named else "")
    store = c10d.PrefixStore("shardwise-mesh", c10d._get_default_store())
    store.set(str(rank), mine)  # once it is there it stays: the same mesh may be passed again and again
    deadline = time.monotonic() + timeout_s
    waiting = [other for other in ranks if other != rank]
    while waiting:
        found = {other: store.get(str(other)).decode() for other in waiting if store.check([str(other)])}
        waiting = [other for other in waiting if found.get(other) != mine]
        if waiting and time.monotonic() > deadline - (0.0 if waiting[0] not in found else 0.9 * timeout_s):
            what = f"passes mesh={found[waiting[0]]}" if waiting[0] in found else f"has passed none within {timeout_s:g} s"
            raise RanksDifferError(
                f"rank {rank} passes mesh={mine}, and rank {waiting[0]} {what}. Pass the same mesh on all of its ranks."
            )
        time.sleep(0.002)


def _check_ranks(mesh: DeviceMesh) -> None:
    ranks = mesh.mesh.flatten().tolist()
    if dist.get_rank() not in ranks:
        _refuse(mesh, f"rank {dist.get_rank()} is not in it. Call shard() on its ranks only, or pass this rank's own mesh")
    if ranks != sorted(ranks):
        _refuse(mesh, f"its ranks {ranks} are not in ascending order. Make it with init_device_mesh, or slice one made so")


def _refuse(mesh: DeviceMesh, why: str) -> NoReturn:
    shape = "x".join(str(size) for size in mesh.mesh.shape)
    raise ConfigError(f"mesh={mesh.mesh_dim_names or 'without names'} of shape {shape} cannot be used: {why}.")


class Blocks(NamedTuple):
    """The ranks of a mesh by role: `by_role[pipe, tensor, replicate, shard]` is a global rank. Missing roles have one number."""

    by_role: torch.Tensor
    names: Mapping[str, str]

    @staticmethod
    def of(mesh: DeviceMesh, named: Mapping[str, str]) -> Blocks:
        """The ranks of a mesh whose dimensions are `named` by role."""
        names = mesh.mesh_dim_names
        assert names is not None
        order = [role for role in ("pipe", "tensor", "replicate", "shard") if role in named]
        ranks = mesh.mesh.permute([names.index(named[role]) for role in order])
        shape = [mesh.size(names.index(named[role])) if role in named else 1 for role in ("pipe", "tensor", "replicate", "shard")]
        return Blocks(ranks.reshape(shape), named)

    def place_of(self, rank: int) -> tuple[int, int, int, int]:
        """Where a global rank is: its numbers along pipe, tensor, replicate and shard."""
        pipe, tensor, replicate, shard = (self.by_role == rank).nonzero()[0].tolist()
        return pipe, tensor, replicate, shard
