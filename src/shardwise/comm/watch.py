"""Names every operation between ranks, and turns a wait that takes too long into an error on every rank.

An operation carries (sequence, kind, Unit). Each rank of a host keeps an account of what it is doing in shared memory, so that a
waiting rank can say what the others are doing; ranks on several hosts exchange notices through torch.distributed's key-value
store. After its first failure a transport refuses all further work, so that no rank waits for the timeout twice.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from shardwise.comm.notices import exchange_notices
from shardwise.comm.segment import SharedSegments
from shardwise.comm.world import World
from shardwise.errors import TransportError
from shardwise.native import library

KINDS = ("gather", "reduce", "fence", "combine")
CHANNELS = ("exchange", "meeting", "prefetch")
"""The operations of one channel have the same order on every rank, and are numbered per channel."""
_LOOKS = 100  # polls before the first sleep: about as long as a peer on another core needs for a small chunk
_NATIVE_LOOKS = 500  # the same in native code
_SHORTEST_NAP_S = 50e-6
_LONGEST_NAP_S = 1e-3
_CHECK_S = 0.1  # how often a waiting rank checks whether its peers still exist and whether any has given up
_WORDS = 5  # per channel of an account: sequence, kind and Unit, step, rank waited for, operations begun
_PEER, _BEGUN = 3, 4
_TAG_BITS = 32
_REMEDY = "Look for the first error in the output of the rank that was waited for; then start all ranks again."
_numbers = itertools.count()  # numbers transports: all ranks make them in the same order


class Operation(NamedTuple):
    """An operation between ranks: its channel, its number in that channel, its kind, and the tag of its Unit (-1: none)."""

    channel: str
    sequence: int
    kind: str
    tag: int

    @property
    def code(self) -> int:
        """Kind and tag packed into one 64-bit word."""
        return KINDS.index(self.kind) << _TAG_BITS | (self.tag + 1)

    @staticmethod
    def decode(channel: str, sequence: int, code: int) -> Operation:
        """Unpack a code into an operation."""
        return Operation(channel, sequence, KINDS[code >> _TAG_BITS], (code & ((1 << _TAG_BITS) - 1)) - 1)


class Watch:
    """Numbers one rank's operations, limits their waits, and reports their failures."""

    def __init__(self, world: World, timeout_s: float) -> None:
        self.world = world
        self.timeout_s = timeout_s
        self._number = next(_numbers)
        self.step = 0
        """Optimizer steps finished so far, for messages."""
        self._names: dict[int, tuple[str, tuple[str, ...]]] = {}
        self._sequences = dict.fromkeys(CHANNELS, 0)
        self._under_way: dict[str, Operation] = {}  # operations running on Lanes, by channel
        self._latest: Operation | None = None  # the last operation of any Unit
        self._failure: str | None = None
        self._host: World | None = None
        self._accounts: list[memoryview] = []
        self._pids: list[int] = []

    def know(self, tag: int, name: str, parameters: Sequence[str]) -> None:
        """Set the names that error messages use for a tag."""
        self._names[tag] = (name, tuple(parameters))

    def share(self, host: World) -> None:
        """From now on, keep the account in memory that the ranks of this host share."""
        segments = SharedSegments(host, 8 * (_WORDS * len(CHANNELS) + 1))
        self._host = host
        self._pids = segments.pids
        self._accounts = [segments.words(r, 0, _WORDS * len(CHANNELS) + 1) for r in range(host.world_size)]
        self._kept = segments

    def join(self, other: Watch) -> None:
        """Exchange notices with the ranks of another transport of the same run."""
        self._number = other._number

    # -- operations -------------------------------------------------------------------------------------------

    def begin(self, channel: str, kind: str, tag: int = -1) -> Operation:
        """Number the next operation of a channel; raise if this run has failed already."""
        self._refuse_after_failure()
        sequence = self._sequences[channel]
        self._sequences[channel] = sequence + 1
        operation = Operation(channel, sequence, kind, tag)
        if self._host is not None:
            self._accounts[self._host.rank][CHANNELS.index(channel) * _WORDS + _BEGUN] = sequence + 1
        if tag >= 0:
            self._latest = operation
        if channel == "meeting":  # those of other channels are written when their Lane runs them
            self._write(operation, -1)
        return operation

    @contextlib.contextmanager
    def during(self, operation: Operation) -> Iterator[None]:
        """Keep an operation in the account while it runs. Any error it raises fails the whole run."""
        self._refuse_after_failure()
        self._write(operation, -1)
        self._under_way[operation.channel] = operation
        try:
            yield
            del self._under_way[operation.channel]
        except TransportError:
            raise
        except BaseException as error:
            self._mark_failed(f"rank {self.world.label} failed in {self.name(operation)}: {error}")
            raise

    def _refuse_after_failure(self) -> None:
        if self._failure is not None:
            raise TransportError(f"this run has failed and accepts no more work. {self._failure}")

    @property
    def has_failed(self) -> bool:
        """Whether this run has failed."""
        return self._failure is not None

    def _write(self, operation: Operation, peer: int) -> None:
        if self._host is not None:
            at = CHANNELS.index(operation.channel) * _WORDS
            words = self._accounts[self._host.rank]
            words[at], words[at + 1], words[at + 2], words[at + 3] = operation.sequence + 1, operation.code, self.step, peer + 1

    # -- waiting ----------------------------------------------------------------------------------------------

    def until(
        self,
        is_ready: Callable[[], bool],
        operation: Operation,
        lagging: Callable[[], list[int]],
        words: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Wait for ranks of this host: poll, then sleep between polls. `lagging` returns the ranks that are missing.

        `words`: (address, target) of counters that have all reached their targets exactly if `is_ready()`. They are waited for
        without the interpreter, whose lock the training thread needs.
        """
        if is_ready():
            return
        native = library()
        if native is not None and words:
            self._until_reached(native, words, is_ready, operation, lagging)
            return
        for _ in range(_LOOKS):
            if is_ready():
                return
        begin = checked = time.monotonic()
        nap = _SHORTEST_NAP_S
        while not is_ready():
            time.sleep(nap)  # lets a peer on the same core run
            nap = min(nap * 1.1, _LONGEST_NAP_S)
            now = time.monotonic()
            if now - checked > _CHECK_S:
                checked = now
                missing = lagging()
                if missing:
                    self._write(operation, missing[0])
                    self._check(operation, missing, now - begin, is_ready)
        self._write(operation, -1)

    def _until_reached(
        self,
        native: ctypes.CDLL,
        words: Sequence[tuple[int, int]],
        is_ready: Callable[[], bool],
        operation: Operation,
        lagging: Callable[[], list[int]],
    ) -> None:
        addresses = (ctypes.c_void_p * len(words))(*(address for address, _ in words))
        targets = (ctypes.c_int64 * len(words))(*(target for _, target in words))
        begin = time.monotonic()
        was_late = False
        while not native.sw_wait(addresses, targets, len(words), _NATIVE_LOOKS, int(1e6 * _CHECK_S)):
            missing = lagging()
            if missing:
                was_late = True
                self._write(operation, missing[0])
                self._check(operation, missing, time.monotonic() - begin, is_ready)
        if was_late:
            self._write(operation, -1)

    def _check(self, operation: Operation, missing: list[int], waited_s: float, is_ready: Callable[[], bool]) -> None:
        assert self._host is not None
        if not is_ready():
            self._refuse_after_failure()  # another thread of this rank may have failed first
        ended = [rank for rank in missing if _state_of(self._pid(rank)) is None]
        if ended and not is_ready():
            raise self.failed(operation, ended, waited_s, "which has ended" if len(ended) == 1 else "which have ended")
        for local, words in enumerate(self._accounts):
            if words[-1] and local != self._host.rank:
                raise self.failed(operation, missing, waited_s, f"until rank {self._host.labels[local]} gave up")
        if waited_s > self.timeout_s:
            raise self.failed(operation, missing, waited_s, f"longer than timeout_s={self.timeout_s:g}")

    def will_not_come(self, operation: Operation, rank: int) -> bool:
        """Whether a rank of this host has ended, or waits in a meeting without having begun this operation.

        That rank cannot begin the operation before the meeting ends, and the meeting waits for this rank.
        """
        assert self._host is not None
        words = self._accounts[self._host.ranks.index(rank)]
        meeting, channel = (CHANNELS.index(name) * _WORDS for name in ("meeting", operation.channel))
        waits = words[meeting + _PEER] != 0
        return (waits and words[channel + _BEGUN] <= operation.sequence) or _state_of(self._pid(rank)) is None

    def wait_all(self, works: Sequence[tuple[Any, int]], operation: Operation) -> None:
        """Wait for messages. Each comes with the rank that sends or receives it (-1: all ranks)."""
        begin = time.monotonic()
        for work, peer in works:
            left_s = max(self.timeout_s - (time.monotonic() - begin), 0.001)
            try:
                work.wait(timedelta(seconds=left_s))
            except RuntimeError as error:
                waited_s = time.monotonic() - begin
                is_late = waited_s >= 0.95 * self.timeout_s
                what = str(error).partition("\n")[0].partition(". ")[0]
                cause = f"longer than timeout_s={self.timeout_s:g}" if is_late else f"until the connection failed ({what})"
                raise self.failed(operation, [peer] if peer >= 0 else [], waited_s, cause) from None

    # -- failing ----------------------------------------------------------------------------------------------

    def failed(self, operation: Operation, missing: list[int], waited_s: float, cause: str) -> TransportError:
        """Mark this rank as failed, so that its peers stop too; return an error that says what all ranks were doing."""
        labels = [self.world.labels[rank] for rank in missing]
        whom = f"rank{'s' if len(labels) > 1 else ''} {', '.join(map(str, labels))}" if labels else "the other ranks"
        beside = [self.name(other) for other in list(self._under_way.values()) if other.channel != operation.channel]
        text = f"rank {self.world.label} waited {waited_s:.1f} s for {whom} in {self.name(operation)}, {cause}."
        text += f" Under way beside it: {', '.join(beside)}." if beside else ""
        if operation.tag < 0 and not beside and self._latest is not None:
            text += f" The last Unit's exchange before it was {self.name(self._latest)}."
        accounts = [self._account(local) for local in range(len(self._accounts)) if self._host and local != self._host.rank]
        full = " ".join([text, *accounts, _REMEDY])
        is_first = self._failure is None
        self._mark_failed(full)
        if is_first and (self._host is None or self._host.world_size < len(self.world.company)):
            accounts += exchange_notices(self._number, self.world.label, self.world.company, text)
            full = self._failure = " ".join([text, *accounts, _REMEDY])
        return TransportError(full)

    def give_up(self) -> None:
        """Fail because the script has ended during an exchange: stop waiting, and make ranks that wait for this one fail."""
        self._mark_failed(f"The script of rank {self.world.label} has ended.")

    def fail(self, text: str) -> None:
        """Fail because another transport of this run has: make ranks that wait for this one fail too."""
        self._mark_failed(text)

    def _mark_failed(self, text: str) -> None:
        self._failure = self._failure or text
        if self._host is not None:
            self._accounts[self._host.rank][-1] = 1

    def name(self, operation: Operation, step: int | None = None) -> str:
        """Describe an operation for an error message: kind, sequence number, module, parameters, step."""
        head, tail = f"{operation.kind} {operation.sequence}", f"at step {self.step if step is None else step}"
        if operation.tag < 0:
            return f"{head} {tail}"
        name, parameters = self._names.get(operation.tag, (str(operation.tag), ()))
        shown = ", ".join(repr(p) for p in parameters[:2]) + (f" and {len(parameters) - 2} more" if len(parameters) > 2 else "")
        return f"{head} of Unit {name!r}{f' (parameters {shown})' if shown else ''} {tail}"

    def _pid(self, rank: int) -> int:
        assert self._host is not None
        return self._pids[self._host.ranks.index(rank)]

    def _account(self, local: int) -> str:
        """Say what another rank of this host is doing."""
        assert self._host is not None
        words, rank = self._accounts[local], self._host.labels[local]
        state = _state_of(self._pids[local])
        where = f"process {self._pids[local]}"
        if state is None:
            return f"Rank {rank} has ended ({where})."
        if state == "T":
            return f"Rank {rank} is stopped ({where})."
        latest = []
        for number, channel in enumerate(CHANNELS):
            sequence, code, step, peer = words[number * _WORDS : number * _WORDS + _BEGUN]
            if not sequence:
                continue
            what = self.name(Operation.decode(channel, sequence - 1, code), step)
            if peer:
                return f"Rank {rank} waits for rank {self.world.labels[peer - 1]} in {what}."
            latest.append((step, channel == "exchange", what))
        if not latest:
            return f"Rank {rank} runs ({where}) and has not begun any exchange."
        return f"Rank {rank} runs ({where}) and waits for nobody; it last took part in {max(latest)[2]}."


def _state_of(pid: int) -> str | None:
    """The kernel's letter for a process's state; None if the process is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            state = stat.read().rpartition(")")[2].split()[0]
    except OSError:
        return None
    return None if state in ("Z", "X") else state
