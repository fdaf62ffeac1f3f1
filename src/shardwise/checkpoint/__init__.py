"""What survives?

Public names: `save`, `load`, `Loaded`, `Subject`, `Progress` (one checkpoint of a run), `Checkpoints` (a directory of them),
`Manifest`, `make_manifest`, `read_manifest` (what is in it), `state_dict`, `load_state_dict` (one rank's part, without files),
`noting_sigterm` (when to save), `load_into_run`, `load_into_plain`, `open_together` (weights from others), `export`,
`export_checkpoint`, `float_dtype`, `MAX_FILE_BYTES` (weights for others), `inspect`, `verify`, `diff`, `Contents`, `Difference`
(looking into a checkpoint).

Invariants: a checkpoint is a directory of safetensors files and a manifest, independent of world size, stage and placement; it is
written by all ranks in parallel, without a central plan and without pickle, and appears by one rename, whole or not at all. It is
read and compared with its checksums before anything of a run is changed.
"""

from shardwise.checkpoint.convert import export_checkpoint
from shardwise.checkpoint.directory import Checkpoints
from shardwise.checkpoint.export import export
from shardwise.checkpoint.exported import float_dtype
from shardwise.checkpoint.hub_files import MAX_FILE_BYTES
from shardwise.checkpoint.inspection import Contents, Difference, diff, inspect, verify
from shardwise.checkpoint.load import Loaded, load
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.pretrained import load_into_plain, load_into_run, open_together
from shardwise.checkpoint.ranges import load_state_dict, state_dict
from shardwise.checkpoint.save import make_manifest, save
from shardwise.checkpoint.saved_files import read_manifest
from shardwise.checkpoint.stopping import noting_sigterm
from shardwise.checkpoint.subject import Subject
from shardwise.checkpoint.tensor_file import Progress

__all__ = [
    "MAX_FILE_BYTES",
    "Checkpoints",
    "Contents",
    "Difference",
    "Loaded",
    "Manifest",
    "Progress",
    "Subject",
    "diff",
    "export",
    "export_checkpoint",
    "float_dtype",
    "inspect",
    "load",
    "load_into_plain",
    "load_into_run",
    "load_state_dict",
    "make_manifest",
    "noting_sigterm",
    "open_together",
    "read_manifest",
    "save",
    "state_dict",
    "verify",
]
