"""What a checkpoint recommends for generation: its optional `generation_config.json`."""

import dataclasses
import pathlib
from typing import Any

from k3jax.config import K3Config
from k3jax.errors import UserError
from k3jax.json_file import read_object
from k3jax.sampling.params import SamplingParams

FILE = "generation_config.json"
_SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclasses.dataclass(frozen=True)
class GenerationDefaults:
    """What holds where a request says nothing else.

    Attributes:
      sampling: settings of a request.
      stop_token_ids: tokens that end the model's text.
    """

    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]

    @classmethod
    def of_model(cls, config: K3Config) -> "GenerationDefaults":
        """Of a model without the file."""
        return cls(SamplingParams(), () if config.eos_token_id is None else (config.eos_token_id,))

    @classmethod
    def from_directory(cls, directory: pathlib.Path, config: K3Config) -> "GenerationDefaults":
        """Reads the file of a checkpoint directory, in Hugging Face's format; what it leaves open is `of_model`'s.

        An absent `top_k` is off, which in Hugging Face's own program is 50; so is -1. `do_sample: false` is
        temperature 0.

        Raises:
          UserError: the file cannot be read, or a value in it is not one.
        """
        path, defaults = directory / FILE, cls.of_model(config)
        if not path.exists():
            return defaults
        values = {name: value for name, value in read_object(path).items() if value is not None}
        try:
            stop_token_ids = _stop_token_ids(values.get("eos_token_id", defaults.stop_token_ids), config.vocab_size)
            return cls(_sampling(values), stop_token_ids)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None


def _sampling(values: dict[str, Any]) -> SamplingParams:
    given = {name: values[name] for name in _SAMPLING_FIELDS if name in values}
    if given.get("top_k") == -1:
        given["top_k"] = 0
    do_sample = values.get("do_sample", True)
    if not isinstance(do_sample, bool):
        raise UserError(f"do_sample is {do_sample!r}, expected true or false")
    sampling = SamplingParams(**given)
    return sampling if do_sample else dataclasses.replace(sampling, temperature=0.0)


def _stop_token_ids(value: Any, vocab_size: int) -> tuple[int, ...]:
    """From one id or a list of them."""
    ids = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise UserError(f"eos_token_id is {value!r}, expected ids of the vocabulary, 0..{vocab_size - 1}")
    return ids
