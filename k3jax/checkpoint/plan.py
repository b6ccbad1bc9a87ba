"""Which tensor of a repository goes into which weight, decided before any weight is read."""

import dataclasses

import jax.numpy as jnp

from k3jax.checkpoint.repository import Repository
from k3jax.checkpoint.safetensors import TensorInfo
from k3jax.config import K3Config
from k3jax.errors import UserError
from k3jax.weights import Weight, WeightTree, leaves

SKIPPED_PREFIXES = ("vision_tower.", "mm_projector.")
"""Parts of the public checkpoints that the text model has no use for."""

_FLOAT_DTYPES = ("BF16", "F32", "F16")


@dataclasses.dataclass(frozen=True)
class PlannedWeight:
    """One leaf of the parameters and the tensors it is made of.

    Attributes:
      path: names from the root of the tree.
      weight: its declaration.
      layers: for each layer of the stack (one entry for a weight without layers) the tensors, in row-major order of
        the stacked axes.
    """

    path: tuple[str, ...]
    weight: Weight
    layers: tuple[tuple[TensorInfo, ...], ...]

    @property
    def name(self) -> str:
        """The path in one word."""
        return "/".join(self.path)


@dataclasses.dataclass(frozen=True)
class LoadingPlan:
    """What a load will do.

    Attributes:
      weights: every leaf, in the order of the tree.
      skipped: names of the tensors that are left out on purpose.
      total_bytes: size of all tensors that are used.
    """

    weights: tuple[PlannedWeight, ...]
    skipped: tuple[str, ...]
    total_bytes: int


def plan_loading(weights: WeightTree, config: K3Config, repository: Repository) -> LoadingPlan:
    """Matches every declared weight with its tensors: a dry run that reads nothing.

    Args:
      weights: declaration of the parameters, `K3ForCausalLM.weights(config)`.
      config: the architecture, for the tensor names.
      repository: the checkpoint.

    Raises:
      UserError: a tensor is missing, has another shape or dtype than declared, or has no use.
    """
    planned, used, total_bytes = [], set(), 0
    for path, weight in leaves(weights):
        layers = []
        for layer in (None,) if weight.layers is None else weight.layers:
            tensors = []
            for name in weight.tensor_names(config, layer):
                tensor = _find(repository, name, weight)
                if name in used:
                    raise ValueError(f"tensor {name} is declared for two weights; the second is {'/'.join(path)}")
                used.add(name)
                total_bytes += tensor.nbytes
                tensors.append(tensor)
            layers.append(tuple(tensors))
        planned.append(PlannedWeight(path, weight, tuple(layers)))
    return LoadingPlan(tuple(planned), _skipped(repository, used), total_bytes)


def is_quantised(weight: Weight) -> bool:
    """Whether a weight holds bytes that must not be converted: packed codes or their scales."""
    return weight.dtype is not None and jnp.issubdtype(weight.dtype, jnp.integer)


def _find(repository: Repository, name: str, weight: Weight) -> TensorInfo:
    """The tensor of this name, if it is what the weight needs."""
    dtypes = ("U8",) if is_quantised(weight) else _FLOAT_DTYPES
    shapes = weight.source.shapes
    tensor = repository.tensors.get(name)
    if tensor is None:
        raise UserError(f"{repository.directory} has no tensor {name}, expected {_either(dtypes)} {_shapes(shapes)}")
    if tensor.shape not in shapes:
        raise UserError(f"tensor {name} has shape {list(tensor.shape)}, expected {_shapes(shapes)}")
    if tensor.dtype not in dtypes:
        raise UserError(f"tensor {name} has dtype {tensor.dtype}, expected {_either(dtypes)}")
    return tensor


def _skipped(repository: Repository, used: set[str]) -> tuple[str, ...]:
    """The tensors left over, which all must be known ones."""
    left = [name for name in repository.tensors if name not in used]
    unknown = [name for name in left if not name.startswith(SKIPPED_PREFIXES)]
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise UserError(
            f"tensor {unknown[0]}{more} in {repository.directory} has no place in the model that config.json describes"
        )
    return tuple(left)


def _either(names: tuple[str, ...]) -> str:
    return " or ".join(names)


def _shapes(shapes: tuple[tuple[int, ...], ...]) -> str:
    return _either(tuple(str(list(shape)) for shape in shapes))
