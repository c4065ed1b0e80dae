"""Several datasets as one, each with its share. Which source sample k comes from is a function of k and the weights.

Notation: w_i weight of source i, normalised to a_i / P with whole numbers; n_i(k) samples of source i before sample k.

The choice keeps |n_i(k) - w_i*k| < 1 for every source at every k: sample j (from 0) of source i may stand at places
floor(j/w_i) .. ceil((j+1)/w_i) - 1, and each place takes the source whose window ends first. Such an order exists and
this rule finds it (Tijdeman 1980, "The chairman assignment problem"; the windows are those of Pfair scheduling, Baruah
et al. 1996). It repeats after P samples, so P choices are stored and every k is looked up.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from fivefold.data.batches import Batch, Dataset, Ints
from fivefold.errors import DataError

LONGEST_PERIOD = 100_000
MOST_SOURCES = 1000
_SOURCE_SEED = 4
"""Number of this use of a seed (`order.py`)."""


class MixtureDataset(Dataset):
    """Sample k is the next sample of the source that the weights choose at k; each source keeps its own order.

    Samples of one source come in the order of that source, and its epochs end when its own samples do.

    Raises: DataError where sources differ in vocabulary or sample length, or weights need too long a period.
    """

    def __init__(self, sources: Sequence[Dataset], weights: Sequence[float]) -> None:
        if not sources or len(sources) != len(weights):
            raise DataError(f"a mixture needs a weight for each source: {len(weights)} for {len(sources)}")
        self.sources = tuple(sources)
        self.shares = whole_shares(weights)
        self.seq_len, self.vocab = sources[0].seq_len, sources[0].vocab
        for source in sources:
            if (source.seq_len, source.vocab) != (self.seq_len, self.vocab):
                raise DataError(
                    f"the sources of a mixture need one tokenizer and one sample length: {sources[0].describe()} has "
                    f"a vocabulary of {self.vocab}, {source.describe()} has {source.vocab}"
                )
        self.period = sum(self.shares)
        self._choice, self._nth = interleaved(self.shares)
        parts = [f"{share}:{source.fingerprint}" for share, source in zip(self.shares, sources)]
        self.fingerprint = hashlib.sha256(" ".join(parts).encode()).hexdigest()

    def describe(self) -> str:
        parts = [f"{s / self.period:.3g} {d.describe()}" for s, d in zip(self.shares, self.sources)]
        return "mixture of " + "; ".join(parts)

    def chosen(self, numbers: Ints) -> tuple[Ints, Ints]:
        """(source, number of the sample in that source) of the samples with these numbers; any shape."""
        periods, places = np.divmod(numbers, self.period)
        source = self._choice[places]
        return source, periods * np.array(self.shares, dtype=np.int64)[source] + self._nth[places]

    def rows(self, numbers: Ints) -> Batch:
        """Ids of documents are told apart by source: document d of source s of n becomes d*n + s."""
        source, inner = self.chosen(numbers)
        shape = (len(numbers), self.seq_len)
        out = Batch(
            tokens_BS=np.empty(shape, dtype=np.int64),
            labels_BS=np.empty(shape, dtype=np.int64),
            loss_mask_BS=np.empty(shape, dtype=np.bool_),
            positions_BS=np.empty(shape, dtype=np.int64),
            document_ids_BS=np.empty(shape, dtype=np.int64),
        )
        for number in np.unique(source).tolist():
            here = source == number
            part = self.sources[number].rows(inner[here])
            ids = part.document_ids_BS
            out.tokens_BS[here], out.labels_BS[here] = part.tokens_BS, part.labels_BS
            out.loss_mask_BS[here], out.positions_BS[here] = part.loss_mask_BS, part.positions_BS
            out.document_ids_BS[here] = np.where(ids < 0, -1, ids * len(self.sources) + number)
        return out


def source_seed(seed: int, number: int) -> int:
    """A seed of its own for each source, so that two copies of one text are not read in step."""
    word = np.random.Philox(counter=[0, 0, 0, _SOURCE_SEED], key=[seed, number]).random_raw(1)[0]
    return int(word) >> 1


def whole_shares(weights: Sequence[float]) -> tuple[int, ...]:
    """The smallest whole numbers in the ratio of the weights as written: 0.7, 0.3 -> 7, 3.

    Raises: DataError for weights that are not above 0, or whose sum is above 100,000.
    """
    if len(weights) > MOST_SOURCES:
        raise DataError(f"a mixture of {len(weights)} sources; at most {MOST_SOURCES}")
    if wrong := [weight for weight in weights if not (weight > 0 and math.isfinite(weight))]:
        raise DataError(f"a weight must be above 0, got {wrong[0]:g}")
    exact = [Fraction(repr(float(weight))) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    common = math.gcd(*whole)
    shares = tuple(number // common for number in whole)
    if sum(shares) > LONGEST_PERIOD:
        total = sum(exact)
        near = ", ".join(f"{float(weight / total):.3f}" for weight in exact[:8])
        raise DataError(
            f"the weights {', '.join(f'{w:g}' for w in weights[:8])} repeat only after {sum(shares)} samples, at most "
            f"{LONGEST_PERIOD}: use fewer digits, such as {near}"
        )
    return shares


def interleaved(shares: Sequence[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(source, how many of that source came before) for each of the places 0..sum(shares)-1 of a period.

    By earliest end of the window; ties go to the source that comes first. O(P log sources).
    """
    period = sum(shares)
    choice, nth = np.empty(period, dtype=np.int64), np.empty(period, dtype=np.int64)
    later = [(0, number, 0) for number in range(len(shares))]  # (first place, source, j), by first place
    ready: list[tuple[int, int, int]] = []  # (last place, source, j)
    for place in range(period):
        while later and later[0][0] <= place:
            _, number, j = heapq.heappop(later)
            heapq.heappush(ready, (-(-(j + 1) * period // shares[number]) - 1, number, j))
        last, number, j = heapq.heappop(ready)
        assert place <= last, "the windows always fit"
        choice[place], nth[place] = number, j
        if j + 1 < shares[number]:
            heapq.heappush(later, ((j + 1) * period // shares[number], number, j + 1))
    return choice, nth
