"""Who owns which bytes?

Public names: `Layout`, `Slot`, `Part`, `Piece`, `make_layout`, `make_tile_layout`, `storage_stride`, `row_major`, `dense_like`,
`is_row_major`, `same_order` (offset arithmetic); `find_units`, `join_small`, `cut_tiles`, `list_params`, `UnitSpec`, `ParamInfo`
(which parameters are gathered together); `Blueprint`, `UnitDtypes`, `Span`, `needs_own_master`, `fill_buckets`, `BUCKET_BYTES`
(Units before they have memory); `Unit`, `UpdatePiece` (Units with memory); `store`, `write_back`, `copy_assigned`, `differs`,
`publish_master`, `publish_part`, `flat_values` (copy values into and out of Units); `UnitState`, `Handle`, `Owner` (lifecycle);
`ShardedParameter`, `FreedParameter`, `FreedView`, `TiledParameter`, `TiledRow`, `TiledView`, `adopt_tiled`, `conceal`, `reveal`,
`refusal`, `METADATA`, `COLLECTIVES`, `name_of`, `is_overwrite`, `map_leaves` (classes of parameters, and operations on them);
`own_data`, `own_grad`, `set_own_grad`, `address_of`, `GRAD`, `REQUIRES_GRAD` (torch's own attributes, past those classes);
`is_dtensor`, `local_of`, `set_local`, `part_of`, `local_grad`, `Form`, `like`, `full_of`, `retype`, `set_values` (parameters that
tensor parallelism has divided).

Invariants: every parameter, or every tile of one, is in exactly one Unit; rank r owns slice r of every Unit; a parameter stays
the same object, with the same shape and name, whether its Unit is gathered or freed.
"""

from shardwise.partition.blueprint import BUCKET_BYTES, Blueprint, Span, UnitDtypes, fill_buckets, needs_own_master
from shardwise.partition.dtensors import Form, full_of, like, local_grad, part_of, retype, set_values
from shardwise.partition.freed import FreedParameter, FreedView, ShardedParameter, map_leaves, refusal
from shardwise.partition.layout import (
    Layout,
    Part,
    Piece,
    Slot,
    dense_like,
    is_row_major,
    make_layout,
    make_tile_layout,
    row_major,
    same_order,
    storage_stride,
)
from shardwise.partition.lifecycle import Handle, Owner, UnitState
from shardwise.partition.operations import COLLECTIVES, METADATA, is_overwrite, name_of
from shardwise.partition.raw import (
    GRAD,
    REQUIRES_GRAD,
    address_of,
    is_dtensor,
    local_of,
    own_data,
    own_grad,
    set_local,
    set_own_grad,
)
from shardwise.partition.tiled import TiledParameter, TiledRow, TiledView, adopt_tiled, conceal, reveal
from shardwise.partition.unit import Unit
from shardwise.partition.units import ParamInfo, UnitSpec, cut_tiles, find_units, join_small, list_params
from shardwise.partition.update_piece import UpdatePiece
from shardwise.partition.values import (
    copy_assigned,
    differs,
    flat_values,
    publish_master,
    publish_part,
    store,
    write_back,
)

__all__ = [
    "BUCKET_BYTES",
    "COLLECTIVES",
    "GRAD",
    "METADATA",
    "REQUIRES_GRAD",
    "Blueprint",
    "Form",
    "FreedParameter",
    "FreedView",
    "Handle",
    "Layout",
    "Owner",
    "ParamInfo",
    "Part",
    "Piece",
    "ShardedParameter",
    "Slot",
    "Span",
    "TiledParameter",
    "TiledRow",
    "TiledView",
    "Unit",
    "UnitDtypes",
    "UnitSpec",
    "UnitState",
    "UpdatePiece",
    "address_of",
    "adopt_tiled",
    "conceal",
    "copy_assigned",
    "cut_tiles",
    "dense_like",
    "differs",
    "fill_buckets",
    "find_units",
    "flat_values",
    "full_of",
    "is_dtensor",
    "is_overwrite",
    "is_row_major",
    "join_small",
    "like",
    "list_params",
    "local_grad",
    "local_of",
    "make_layout",
    "make_tile_layout",
    "map_leaves",
    "name_of",
    "needs_own_master",
    "own_data",
    "own_grad",
    "part_of",
    "publish_master",
    "publish_part",
    "refusal",
    "retype",
    "reveal",
    "row_major",
    "same_order",
    "set_local",
    "set_own_grad",
    "set_values",
    "storage_stride",
    "store",
    "write_back",
]
