"""What survives?

Public names: `save`, `load`, `Loaded`, `Subject`, `Progress` (one checkpoint of a run), `Checkpoints` (a directory of them),
`Manifest`, `make_manifest`, `read_manifest` (what is in it), `state_dict`, `load_state_dict` (one rank's part, without files),
`noting_sigterm` (when to save).

Invariants: a checkpoint is a directory of safetensors files and a manifest, independent of world size, stage and placement; it is
written by all ranks in parallel, without a central plan and without pickle, and appears by one rename, whole or not at all. It is
read and compared with its checksums before anything of a run is changed.
"""

from shardwise.checkpoint.directory import Checkpoints
from shardwise.checkpoint.load import Loaded, load, read_manifest
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.ranges import load_state_dict, state_dict
from shardwise.checkpoint.save import make_manifest, save
from shardwise.checkpoint.stopping import noting_sigterm
from shardwise.checkpoint.subject import Subject
from shardwise.checkpoint.tensor_file import Progress

__all__ = [
    "Checkpoints",
    "Loaded",
    "Manifest",
    "Progress",
    "Subject",
    "load",
    "load_state_dict",
    "make_manifest",
    "noting_sigterm",
    "read_manifest",
    "save",
    "state_dict",
]
