"""What the service serves from: a model, and an engine once there is one."""

from k3jax.catalog import Description
from serving.engine.engine import Engine
from serving.engine.request import NotServing


class Backend:
    """Changes only when the engine comes and when the server begins to shut down.

    Attributes:
      checkpoint: its name.
      dtype: of activations.
      description: the model without its weights.
      engine: None while weights are loaded.
      draining: new requests are refused, and those that end early do so because the server does.
    """

    def __init__(self, checkpoint: str, dtype: str, description: Description):
        self.checkpoint, self.dtype, self.description = checkpoint, dtype, description
        self.engine: Engine | None = None
        self.draining = False

    @property
    def serving(self) -> bool:
        """Whether requests are taken."""
        return not self.draining and self.engine is not None and self.engine.state == "serving"

    def require_engine(self) -> Engine:
        """The engine, for a new request.

        Raises:
          NotServing: says why.
        """
        if self.serving:
            return self.engine
        state = "shutting down" if self.draining else self.engine.state if self.engine else "starting"
        raise NotServing(f"the server is {_SAID.get(state, state)}; try again later, or another server")


_SAID = {"draining": "shutting down", "failed": "out of order after a failure"}
