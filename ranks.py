"""The ranks of a job: how they meet, hear one answer from rank 0, and share work out.

The launcher and the network between ranks are the outside system here; a decision is made once and reaches all.
"""
import concurrent.futures
import contextlib
import datetime

import torch
import torch.distributed as dist

import preflight
from preflight import CAUGHT, on_device


@contextlib.contextmanager
def start_ranks(device_type, one_thread, interrupt, patience_s):
    """Joins the process group, sets threads and signal handlers, and in the end puts all of them back. Ranks: all.

    A rank that does not answer for `patience_s` ends the session. Before the ranks have met there is nothing to save,
    and a signal just ends the process."""
    threads = torch.get_num_threads()
    ranks = preflight.take_place(device_type, one_thread)
    own_group = ranks.world_size > 1 and not dist.is_initialized()
    preflight.end_with_launcher()  # before the ranks meet in it: they would wait for a dead one
    if own_group:
        dist.init_process_group("nccl" if device_type == "cuda" else "gloo",
                                timeout=datetime.timedelta(seconds=patience_s))
    with interrupt.listening():
        failed = True
        try:
            yield ranks
            failed = False
        finally:
            torch.set_num_threads(threads)
            if own_group and not (failed and device_type == "cuda"):  # NCCL would wait for ranks that wait elsewhere
                dist.destroy_process_group()


def from_rank_0(ranks, function, *arguments):
    """What `function` returns or raises on rank 0, on every rank: one reading, one decision. Ranks: all (broadcast)."""
    answer = [None, None]
    if ranks.rank == 0:
        try:
            answer[0] = function(*arguments)
        except Exception as error:  # raised again below, on every rank: the others wait for an answer
            answer[1] = error
    if ranks.world_size > 1:
        dist.broadcast_object_list(answer, src=0, device=ranks.device)
    if answer[1] is not None:
        answer[1].told_by_rank_0 = ranks.rank > 0
        raise answer[1]
    return answer[0]


def patiently_from_rank_0(ranks, interrupt, function, *arguments):
    """from_rank_0 for what may outlast the ranks' patience: they hear from rank 0 in between. A signal to any of them
    ends it: `function` learns from its last argument, a call, that it should return. Ranks: all (broadcasts).
    Raises KeyboardInterrupt then: nothing is loaded yet that could be saved."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        task = thread.submit(function, *arguments, lambda: bool(interrupt.name)) if ranks.rank == 0 else None
        while not from_rank_0(ranks, lambda: bool(concurrent.futures.wait([task], 2).done)):
            signals_heard(ranks, interrupt)
    if signals_heard(ranks, interrupt):
        raise KeyboardInterrupt("stopped (signal): nothing was loaded yet that could be saved")
    return from_rank_0(ranks, lambda: task.result())


def signals_heard(ranks, interrupt):
    """The signals that any rank has got, the same names on each; they count as its own. Ranks: all (one all-reduce)."""
    heard = on_device([name == interrupt.name for name in CAUGHT], ranks.device)
    if ranks.world_size > 1:
        dist.all_reduce(heard)
    return interrupt.note([name for name, count in zip(CAUGHT, heard.tolist()) if count])


def share_of(count, ranks):
    """The contiguous run of 0..count-1 that is this rank's; runs differ by at most one. 5 over 3 ranks: 0-1, 2-3, 4."""
    base, extra = divmod(count, ranks.world_size)
    first = ranks.rank * base + min(ranks.rank, extra)
    return range(first, first + base + (ranks.rank < extra))
