"""Seconds of communication by axis. Bytes are those of the events that the strategies predict (`core.events`).

A ring over n ranks moves (n-1)/n of the larger buffer for an all-gather or a reduce-scatter, twice that for an
all-reduce (Thakur et al. 2005, "Optimization of collective communication operations in MPICH", section 3). The link
that the slowest member has decides: inside the fast domain the device's link; across, the network's share of a device
times the members in one domain, which all send at once. `c` are the coefficients as columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fivefold.estimate.compute import HALF, expert_width, routed_tokens

if TYPE_CHECKING:
    from fivefold.estimate.jobs import Blocks, Column, Jobs

    Values = dict[str, Column]


def inside(degree: Column, stride: Column, jobs: Jobs) -> Column:
    """Members of one group in one fast domain, where neighbours of the group are `stride` ranks apart."""
    import numpy as np

    return np.clip(np.floor(jobs.domain / stride), 1, degree)


def bus(degree: Column, stride: Column, jobs: Jobs, c: Values) -> Column:
    """Bytes/s of a collective over a group: min(link, network share x members in one domain) where it leaves it."""
    import numpy as np

    link = jobs.link_bytes_per_s * c["link"]
    members = inside(degree, stride, jobs)
    network = jobs.nic_bytes_per_s * c["nic"] * members
    return np.where(members >= degree, link, np.minimum(link, network))


def gather(size: Column, degree: Column, stride: Column, jobs: Jobs, c: Values) -> Column:
    """Seconds of an all-gather or a reduce-scatter whose larger buffer has `size` bytes.

    Formula: (n-1)/n size / bus + latency x (1 + log2 n). Source: Thakur et al. 2005, section 3.1.
    """
    import numpy as np

    wait = c["latency"] * (1 + np.log2(degree))
    seconds = (degree - 1) / degree * size / bus(degree, stride, jobs, c) + wait
    return np.where((degree > 1) & (size > 0), seconds, 0.0)


def hidden_bytes(jobs: Jobs) -> Column:
    """Bytes of the activations between layers: T D x 2."""
    return jobs.tokens * jobs.hidden * HALF


def cut_parts(block: Blocks) -> Column:
    """Parts of a layer that tensor parallelism cuts: attention, and the MLP of a dense layer."""
    import numpy as np

    return np.where(block.heads > 0, 1.0, 0.0) + np.where((block.ffn > 0) & (block.experts == 0), 1.0, 0.0)


def tensor(jobs: Jobs, c: Values) -> Column:
    """Forward of one layer's attention or MLP: one all-reduce of T D elements, or its two halves; backward the same.

    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3; `strategies.tensor.rules.predict_chunk`.
    """
    return 2 * gather(hidden_bytes(jobs), jobs.tp, jobs.tp * 0 + 1, jobs, c)


def context(block: Blocks, jobs: Jobs, c: Values) -> Column:
    """Keys and values of the other cp ranks, once forward; backward twice (they and their gradients).

    Formula: an all-gather of 2 S b K H / tp elements, whichever way they travel (ring or gather).
    Source:  Liu et al. 2023, arXiv:2310.01889, section 3; `strategies.context.rules.predict_chunk`.
    """
    return gather(context_bytes(block, jobs), jobs.cp, jobs.tp, jobs, c)


def context_bytes(block: Blocks, jobs: Jobs) -> Column:
    """Keys and values of one layer and microbatch, of all cp ranks together."""
    import numpy as np

    width = np.maximum(block.kv_heads / jobs.tp, 1) * (block.qk_dim + block.v_dim)
    return jobs.micro_batch * jobs.seq_len * width * HALF


def expert(block: Blocks, jobs: Jobs, c: Values) -> Column:
    """Dispatch and combine of one layer, forward; backward the same. With etp, tokens are gathered over it and summed.

    Formula: 2 x T/tp k D x 2 bytes to all ep ranks; those outside the domain go over the network. With one copy for
             each rank rather than each choice, k becomes ep (1 - (1 - 1/ep)^k) (DeepSeek-V3, arXiv:2412.19437, 3.2.2).
    Source:  Lepikhin et al. 2020, GShard, arXiv:2006.16668, section 3.2; Liu et al. 2025, arXiv:2504.14960.
    """
    import numpy as np

    size = dispatched_bytes(block, jobs)
    members = inside(jobs.ep, jobs.etp, jobs)
    near = size * (members - 1) / jobs.ep / (jobs.link_bytes_per_s * c["link"])
    far = size * (jobs.ep - members) / jobs.ep / (jobs.nic_bytes_per_s * c["nic"])
    sent = np.where(jobs.ep > 1, 2 * (np.maximum(near, far) + 2 * c["latency"]), 0.0)
    one = np.ones_like(jobs.etp)
    cut = 2 * gather(size * jobs.etp, jobs.etp, one, jobs, c)
    return np.where(block.experts > 0, sent + cut, 0.0)


def dispatched_bytes(block: Blocks, jobs: Jobs) -> Column:
    """Tokens of one rank with their copies for one layer and microbatch, those for its own experts among them."""
    import numpy as np

    choices = np.maximum(block.top_k, 1)
    ranks = jobs.ep * (1 - (1 - 1 / jobs.ep) ** choices)
    copies = np.where(jobs.one_copy, ranks / choices, 1.0)
    size: Column = copies * routed_tokens(block, jobs) / jobs.etp * expert_width(block, jobs) * HALF
    return size


def message(jobs: Jobs, c: Values) -> Column:
    """One message between neighbouring stages: T D x 2 bytes, a part of it under sequence parallelism.

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 3.2 and 4.1 (scatter and gather over tp).
    """
    import numpy as np

    stride = jobs.tp * jobs.cp * jobs.dp
    link = np.where(
        stride * jobs.pp <= jobs.domain, jobs.link_bytes_per_s * c["link"], jobs.nic_bytes_per_s * c["nic"]
    )
    seconds = hidden_bytes(jobs) / jobs.tp / link + c["latency"]
    return np.where(jobs.pp > 1, seconds, 0.0)


def reduce_bytes(parameters: Column, jobs: Jobs) -> tuple[Column, Column]:
    """Bytes of one rank's gradients to sum over the data ranks, and of its parameters to gather after the update."""
    return parameters * jobs.grad_bytes, parameters * HALF
