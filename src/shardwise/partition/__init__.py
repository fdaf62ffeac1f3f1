"""Who owns which bytes?

Public names: `Layout`, `Slot`, `Piece`, `make_layout`, `storage_stride` (offset arithmetic); `find_units`,
`list_params`, `UnitSpec`, `ParamInfo` (which parameters are gathered together); `Unit`, `UnitDtypes`, `UpdatePiece`,
`flat_values`; `UnitState`, `Handle`, `Owner`, `ShardedParameter`, `FreedParameter`, `FreedView`, `own_grad`,
`set_own_grad`, `is_trained` (lifecycle).

Invariants: every parameter is in exactly one Unit; rank r owns slice r of every Unit; a parameter keeps its identity,
shape, name and place whether its Unit is gathered or freed.
"""

from shardwise.partition.layout import Layout, Piece, Slot, make_layout, storage_stride
from shardwise.partition.lifecycle import (
    COLLECTIVES,
    METADATA,
    FreedParameter,
    FreedView,
    Handle,
    Owner,
    ShardedParameter,
    UnitState,
    is_trained,
    name_of,
    own_grad,
    set_own_grad,
)
from shardwise.partition.unit import Span, Unit, UnitDtypes, UpdatePiece, flat_values
from shardwise.partition.units import ParamInfo, UnitSpec, find_units, list_params

__all__ = [
    "COLLECTIVES",
    "METADATA",
    "FreedParameter",
    "FreedView",
    "Handle",
    "Layout",
    "Owner",
    "ParamInfo",
    "Piece",
    "ShardedParameter",
    "Slot",
    "Span",
    "Unit",
    "UnitDtypes",
    "UnitSpec",
    "UnitState",
    "UpdatePiece",
    "find_units",
    "flat_values",
    "is_trained",
    "list_params",
    "make_layout",
    "name_of",
    "own_grad",
    "set_own_grad",
    "storage_stride",
]
