"""`SharedMemory`: ranks of one host reduce in memory that they share. CPU tensors only.

Horovod's background threads negotiate each reduction, which takes 2 ms beside ranks that compute on
all cores. Here a rank copies its data to its slot, waits for the others at a barrier of sockets,
and reduces: a part of it where it is large, all of it where that is cheaper than a second barrier.
Who waits sleeps; who has gone has closed its sockets, which the others notice at once.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from hvdtrain.collectives.arrays import ArrayCollective
from hvdtrain.collectives.base import Array, Collective, ReduceOp
from hvdtrain.collectives.single import SingleCollective
from hvdtrain.errors import CollectiveError, RankGoneError
from hvdtrain.horovod_check import HorovodCheck
from hvdtrain.rendezvous.barrier import exchange, open_rendezvous
from hvdtrain.world import World

_SLOT_BYTES = 1 << 22
"""What a rank shares at a time. The memory is at most (2 * size + 2) times as large."""
_HEAD_BYTES = 256
_ALL_BYTES = 1 << 19
"""Up to this size, over all ranks, each rank reduces the whole."""
_MOST_RANKS = 64
"""Rank 0 makes about 2 n log2(n) sockets; 1024 files are open to a process by default."""
_START_S = 60.0
_GPUS = ("/proc/driver/nvidia/gpus", "/sys/module/amdgpu")
_FUNCTIONS = {"average": np.add, "sum": np.add, "min": np.minimum, "max": np.maximum}


class SharedMemory(ArrayCollective):
    """The collective of ranks that `start` has connected.

    Args:
        rank: Integer, this process.
        size: Integer, the number of processes.
        memory: File descriptor of memory of `memory_bytes(size)`, which this takes over.
        rounds: The sockets of each round of a barrier: of the rank `2**k` further, to which this
            one sends, and of the one `2**k` before, from which it receives.
    """
    # Each exchange takes the other one of two sets of slots and a result: when a rank writes to a
    # set again, all ranks have passed the barrier of the exchange between, and so read it.

    name = "shared-memory"
    tells_waiting = True

    def __init__(self, rank: int, size: int, memory: int,
                 rounds: Sequence[tuple[socket.socket, socket.socket]]) -> None:
        self.rank, self.size = rank, size
        self._rounds = tuple(rounds)
        mapped = mmap.mmap(memory, memory_bytes(size))
        os.close(memory)
        self._sets = np.frombuffer(mapped, np.uint8).reshape(2, size + 1, -1)
        self._turn = 0

    @classmethod
    def automatic(cls, world: World, horovod: HorovodCheck) -> str | None:
        if not 1 < world.size == world.local_size <= _MOST_RANKS:
            return None
        if not _sees_gpus(os.environ):
            return "all ranks are on one host, without GPUs"
        if horovod.ok:
            return None
        return f"all ranks are on one host; {next(iter(horovod.problems), 'no Horovod')}"

    @classmethod
    def check_start(cls, world: World, horovod: HorovodCheck) -> None:
        del horovod
        if world.local_size != world.size or world.size > _MOST_RANKS:
            raise CollectiveError(
                f"`{cls.name}` needs ranks on one host, at most {_MOST_RANKS}. Started were "
                f"{world.size}, {world.local_size} of them on {world.host}. Use `auto`.")

    @classmethod
    def start(cls, world: World, environ: Mapping[str, str],
              process_sets: Sequence[Sequence[int]] = ()) -> SharedMemory:
        del process_sets
        client = open_rendezvous(world, environ, "hvdtrain.shared_memory")
        return cls._meet(world.rank, world.size,
                         lambda address: exchange(client, world, "address", address)[0])

    @classmethod
    def _meet(cls, rank: int, size: int, tell: Callable[[str], str]) -> SharedMemory:
        """Connect the ranks; `tell` gives all of them the text of rank 0."""
        with ExitStack() as stack:
            address = ""
            if rank == 0:
                address = f"hvdtrain-{secrets.token_hex(16)}"
                listener = stack.enter_context(socket.socket(socket.AF_UNIX))
                listener.bind(f"\0{address}")
                listener.listen(size)
                listener.settimeout(_START_S)
            address = tell(address)
            try:
                memory, *files = _deal(listener, size) if rank == 0 else _take(address, rank)
            except OSError as error:
                raise CollectiveError(
                    f"The ranks of this host cannot connect by a local socket ({error}). Are they "
                    "in several containers? Use --collective horovod-gloo.") from error
        ends = [socket.socket(fileno=number) for number in files]
        return cls(rank, size, memory, list(zip(ends[::2], ends[1::2], strict=True)))

    def _subset(self, members: list[int]) -> Collective | None:
        def tell(address: str) -> str:
            addresses = self.gather_objects(address)
            return str(addresses[members[0]])
        if self.rank not in members or len(members) == 1:
            tell("")
            return SingleCollective() if self.rank in members else None
        return self._meet(members.index(self.rank), len(members), tell)

    def _barrier(self) -> None:
        begin = time.perf_counter()
        for number, (ahead, behind) in enumerate(self._rounds):
            try:
                ahead.send(b"\1")
                here = behind.recv(1)
            except OSError:
                here = b""
            if not here:
                raise RankGoneError(
                    f"Rank {(self.rank - (1 << number)) % self.size} or one that it waits for has "
                    "left the shared memory. Look for its error.")
        self.waited_s += time.perf_counter() - begin

    def _share(self, what: str, *parts: tuple[int, Array]) -> Array:
        """Write bytes from some places of this rank's slot on; the slots, valid for two calls."""
        # The text says what this rank does, and must be equal on all.
        self._turn ^= 1
        heads = self._sets[self._turn, :-1, :_HEAD_BYTES]
        slots: Array = self._sets[self._turn, :, _HEAD_BYTES:]
        heads[self.rank] = np.frombuffer(
            what.encode()[:_HEAD_BYTES].ljust(_HEAD_BYTES, b"\0"), np.uint8)
        for place, part in parts:
            slots[self.rank, place:place + part.size] = part
        self._barrier()
        if (heads != heads[self.rank]).any():
            texts = [bytes(head).rstrip(b"\0").decode(errors="replace") for head in heads]
            other = next(rank for rank, text in enumerate(texts) if text != texts[self.rank])
            raise CollectiveError(
                f"The ranks do different things: rank {self.rank} calls {texts[self.rank]}; rank "
                f"{other} calls {texts[other]}. Expected the same calls, in the same order, on all "
                "ranks.")
        return slots

    def _reduce_flat(self, arrays: Sequence[Array], op: ReduceOp, name: str) -> Array:
        dtype = arrays[0].dtype
        ends = np.cumsum([array.nbytes for array in arrays]).tolist()
        total = np.empty(ends[-1], np.uint8)
        pieces = [(end - array.nbytes, end, array.view(np.uint8))
                  for end, array in zip(ends, arrays, strict=True)]
        for begin in range(0, ends[-1], _SLOT_BYTES):
            end = min(begin + _SLOT_BYTES, ends[-1])
            slots = self._share(f"reduce `{name}`: {op} of {ends[-1]} bytes of {dtype}", *(
                (max(first - begin, 0), piece[max(begin - first, 0):end - first])
                for first, last, piece in pieces if first < end and begin < last))
            slots = slots[:, :end - begin].view(dtype)
            found = total[begin:end].view(dtype)
            if (end - begin) * self.size <= _ALL_BYTES:
                self._reduce_slots(slots[:-1], op, found)
            else:
                cut = [slots.shape[1] * rank // self.size for rank in (self.rank, self.rank + 1)]
                self._reduce_slots(slots[:-1, slice(*cut)], op, slots[-1, slice(*cut)])
                self._barrier()
                found[:] = slots[-1]
        return total.view(dtype)

    def _reduce_slots(self, slots: Array, op: ReduceOp, out: Array) -> None:
        """Reduce in the order of the ranks, which gives the same bits on each."""
        function = _FUNCTIONS[op]
        function(slots[0], slots[1], out=out)
        for slot in slots[2:]:
            function(out, slot, out=out)
        if op == "average":
            out /= self.size

    def _gather_flat(self, mine: Array, name: str) -> tuple[Array, Sequence[int]]:
        what = f"gather `{name}`"
        told = self._share(what, (0, np.array([mine.nbytes]).view(np.uint8)))[:-1, :8]
        sizes = np.ascontiguousarray(told).view(np.int64)[:, 0].tolist()
        gathered = [np.empty(size, np.uint8) for size in sizes]
        for begin in range(0, max(sizes), _SLOT_BYTES):
            slots = self._share(what, (0, mine.view(np.uint8)[begin:begin + _SLOT_BYTES]))
            for part, slot in zip(gathered, slots[:-1], strict=True):
                piece = part[begin:begin + _SLOT_BYTES]
                piece[:] = slot[:piece.size]
        return (np.concatenate(gathered).view(mine.dtype),
                [size // mine.itemsize for size in sizes])

    def _exchange(self, array: Array, name: str) -> Array:
        sent = array.reshape(self.size, -1).view(np.uint8)
        received = np.empty_like(sent)
        room = _SLOT_BYTES // self.size
        for begin in range(0, sent.shape[1], room):
            slots = self._share(f"exchange `{name}`: {array.nbytes} bytes", *(
                (rank * room, part[begin:begin + room]) for rank, part in enumerate(sent)))
            piece = received[:, begin:begin + room]
            place = self.rank * room
            piece[:] = slots[:-1, place:place + piece.shape[1]]
        return received.view(array.dtype)

    def _broadcast_bytes(self, part: Array, root: int) -> Array:
        received = np.empty_like(part)
        for begin in range(0, part.size, _SLOT_BYTES):
            piece = received[begin:begin + _SLOT_BYTES]
            mine = [(0, part[begin:begin + _SLOT_BYTES])] if self.rank == root else []
            what = f"broadcast of {part.size} bytes from rank {root}"
            piece[:] = self._share(what, *mine)[root, :piece.size]
        return received

    def close(self) -> None:
        for pair in self._rounds:
            for end in pair:
                end.close()


def memory_bytes(size: int) -> int:
    """The size of the memory that `size` ranks share."""
    return 2 * (size + 1) * (_HEAD_BYTES + _SLOT_BYTES)


def _sees_gpus(environ: Mapping[str, str]) -> bool:
    hidden = environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not hidden and any(Path(place).exists() for place in _GPUS)


def _deal(listener: socket.socket, size: int) -> list[int]:
    """Rank 0: make memory and sockets, and give each rank its own; those of rank 0."""
    memory = os.memfd_create("hvdtrain")
    os.truncate(memory, memory_bytes(size))
    files: list[list[int]] = [[os.dup(memory)] for _ in range(size)]
    os.close(memory)
    distance = 1
    while distance < size:
        pairs = [socket.socketpair() for _ in range(size)]
        for rank in range(size):
            files[rank] += [pairs[rank][0].detach(), pairs[rank - distance][1].detach()]
        distance *= 2
    met = 1
    while met < size:
        with listener.accept()[0] as connection:
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            if struct.unpack("3i", credentials)[1] != os.getuid():
                continue
            connection.settimeout(_START_S)
            told = connection.recv(1)
            if not told:
                continue
            rank = told[0]
            socket.send_fds(connection, [b"\1"], files[rank])
        for number in files[rank]:
            os.close(number)
        met += 1
    return files[0]


def _take(address: str, rank: int) -> list[int]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_START_S)
        connection.connect(f"\0{address}")
        connection.send(bytes([rank]))
        _, files, _, _ = socket.recv_fds(connection, 1, 1 + 2 * _MOST_RANKS)
        if not files:
            raise ConnectionResetError("rank 0 has ended")
        return list(files)
