"""Chained keys: one for each complete match unit of a prompt, which stands for everything before its end."""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from k3jax.errors import UserError

_FORMAT = "k3jax prefix cache 1"


class ChainHasher:
    """Turns token ids into keys.

    Key k is SHA-256 of key k - 1 and the unit's tokens, so equal keys mean equal prefixes. The chain begins with
    everything else that a state depends on; two caches with a different model, weights, layout or salt share nothing.
    """

    def __init__(self, *, model: str, weights: str, state_layout: str, unit: int = 128):
        """
        Args:
          model: name or digest of the architecture.
          weights: name and version of the weights, adapters included.
          state_layout: dtypes and layout of states and latents.
          unit: match unit in tokens.
        """
        self.unit = unit
        self._root = _digest(_FORMAT, model, weights, state_layout, str(unit))

    def keys(self, tokens: Sequence[int] | np.ndarray, *, salt: str = "",
             extra: Mapping[int, bytes] | None = None) -> list[bytes]:
        """Keys of the complete units, 32 bytes each.

        Args:
          tokens: [n] token ids; an int32 array is hashed without a copy.
          salt: of the principal; requests with different salts never share anything.
          extra: what the tokens of a unit do not say, by index of the unit: for example an image's digest and offset.

        Raises:
          UserError: an id is not a whole number, or does not lie in 0 .. 2**31 - 1.
        """
        data = memoryview(_token_array(tokens)).cast("B")
        extra = extra or {}
        size = 4 * self.unit
        key, keys = _digest(self._root.hex(), salt), []
        for number, start in enumerate(range(0, len(data) - size + 1, size)):
            link = hashlib.sha256(key)
            link.update(data[start : start + size])
            if number in extra:
                # Nothing is ambiguous: what comes before has a fixed length.
                link.update(extra[number])
            key = link.digest()
            keys.append(key)
        return keys


def _digest(*fields: str) -> bytes:
    """SHA-256 of fields, each preceded by its length: no two lists of fields look alike."""
    link = hashlib.sha256()
    for field in fields:
        data = field.encode()
        link.update(len(data).to_bytes(8, "little") + data)
    return link.digest()


def _token_array(tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    """[n] contiguous little-endian int32."""
    array = np.asarray(tokens)
    if array.ndim != 1:
        raise UserError(f"tokens have shape {array.shape}, expected one dimension")
    if array.size == 0:
        return np.empty(0, "<i4")
    if array.dtype == np.bool_ or not np.issubdtype(array.dtype, np.integer):
        raise UserError(f"tokens are {array.dtype}, expected whole numbers that fit in 32 bits")
    low, high = array.min(), array.max()
    if low < 0 or high > 2**31 - 1:
        raise UserError(f"token id {low if low < 0 else high} does not lie in 0 .. {2**31 - 1}")
    return np.ascontiguousarray(array, "<i4")
