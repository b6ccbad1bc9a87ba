"""Whose chat format a tokenizer's special tokens belong to, and whether they fit a model.

The families share base tokens and vocabulary size, and use the same ids for different markers: only names tell.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from k3jax.config import K3Config
from k3jax.errors import UserError

if TYPE_CHECKING:
    from k3jax.tokenizer import Tokenizer

NAMES = {"kimi-k3": "Kimi K3", "kimi-k2": "Kimi-Linear"}

# Special tokens that tell a family, by their offset from the first special slot.
FAMILIES: Mapping[str, Mapping[str, int]] = {
    "kimi-k3": {"<|end_of_msg|>": 2, "<|open|>": 3, "<|close|>": 4, "<|sep|>": 5},
    "kimi-k2": {"<|im_end|>": 2, "<|im_user|>": 3, "<|im_assistant|>": 4},
}


def family_of(special_tokens: Mapping[str, int], first_slot: int) -> str | None:
    """The family that has all its names in their slots; None for a vocabulary of another kind."""
    for family, offsets in FAMILIES.items():
        if all(special_tokens.get(name) == first_slot + offset for name, offset in offsets.items()):
            return family
    return None


def check_tokenizer(tokenizer: "Tokenizer", config: K3Config) -> None:
    """Refuses a tokenizer whose tokens mean something else to the model, or nothing.

    A vocabulary without the names of either family is a researcher's own and passes, and so does any family where
    the architecture is a mixture of both.

    Raises:
      UserError: more ids than the model has embeddings, shifted special tokens, or the other family's.
    """
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} ids but vocab_size in config.json is {config.vocab_size}; "
            "use the tokenizer files that came with the model"
        )
    for offsets in FAMILIES.values():
        if offsets.keys() <= tokenizer.special_tokens.keys():
            for name, offset in offsets.items():
                found, expected = tokenizer.special_tokens[name], tokenizer.num_base_tokens + offset
                if found != expected:
                    raise UserError(
                        f"tokenizer_config.json gives {name} the id {found}, expected {expected}; special ids may have "
                        "shifted in a conversion, use the file that came with the model"
                    )
    family = _architecture(config)
    if tokenizer.family and family and tokenizer.family != family:
        raise UserError(
            f"tokenizer_config.json names the special tokens of {NAMES[tokenizer.family]} but config.json describes "
            f"{NAMES[family]}; use the tokenizer files that came with the model"
        )


def _architecture(config: K3Config) -> str | None:
    """The family that a model of this architecture was published with; None for a mixture."""
    traits = (config.hidden_act == "situ", config.gate_lower_bound is not None, config.attn_res_block_size is not None)
    if all(traits):
        return "kimi-k3"
    return None if any(traits) else "kimi-k2"
